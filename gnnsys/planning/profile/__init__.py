"""What a job asks of machines, batch by batch: counted before there are any (`gnnsys profile`), or in a run's trace."""
