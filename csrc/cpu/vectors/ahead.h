// Asking for the rows that come next. Part of level.h, once per level.

template <typename T, typename id_t>
class RowsAhead {
 public:
  // Of rows that begin at `whole` and are `stride` apart; none where `whole` is null.
  RowsAhead(const T* whole, int64_t stride, const Neighbors<id_t>& near)
      : RowsAhead(whole, stride, near, neighbors_ahead(stride * static_cast<int64_t>(sizeof(T)))) {}

  int64_t end() const { return end_; }  // behind the last neighbour for which there is a later one to ask for

  void ask(int64_t k) const { prefetch_read(whole_ + later_[k] * stride_, bytes_); }

 private:
  RowsAhead(const T* whole, int64_t stride, const Neighbors<id_t>& near, int64_t ahead)
      : whole_(whole),
        stride_(stride),
        bytes_(stride * static_cast<int64_t>(sizeof(T))),
        later_(near.ids + ahead),
        end_(whole == nullptr ? 0 : std::min(near.readable - ahead, near.count)) {}

  const T* whole_;
  int64_t stride_;
  int64_t bytes_;
  const id_t* later_;
  int64_t end_;
};
