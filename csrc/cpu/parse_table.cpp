// Lines of numbers to columns: tables of edges, in pieces that end at a line's end.
//
// Blank lines are skipped, '#' and '%' start a comment anywhere in a line, blanks around a field are ignored. Threads
// take ranges of whole lines and append to columns of their own, which are joined in order. Work: one visit per byte.
#include "common/check.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"

#include <charconv>
#include <cstring>
#include <string_view>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kBytesPerThread = 1 << 18;
constexpr int64_t kMostLines = int64_t{1} << 62;
constexpr size_t kQuotedBytes = 40;  // of a field that an error shows

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f'; }

std::string_view trim(std::string_view text) {
  while (!text.empty() && is_blank(text.front())) {
    text.remove_prefix(1);
  }
  while (!text.empty() && is_blank(text.back())) {
    text.remove_suffix(1);
  }
  return text;
}

// One range's rows, 8 bytes a value (int64, or double), field after field; and what stopped it.
struct Rows {
  std::vector<int64_t> values;
  int64_t num_lines = 0;
  std::string error;  // of line num_lines, counted from the range's first as 1
};

struct Format {
  std::string kinds;  // per field 'i' for an integer, 'f' for a float
  char delimiter;     // 0: runs of blanks

  // Takes the next field off `rest`; a line ends where `done`.
  std::string_view next(std::string_view& rest, bool& done) const {
    size_t end = 0;
    if (delimiter != 0) {
      const auto* at = static_cast<const char*>(std::memchr(rest.data(), delimiter, rest.size()));
      end = at == nullptr ? rest.size() : static_cast<size_t>(at - rest.data());
      const std::string_view field = trim(rest.substr(0, end));
      done = end == rest.size();
      rest.remove_prefix(done ? end : end + 1);
      return field;
    }
    while (end < rest.size() && !is_blank(rest[end])) {
      ++end;
    }
    const std::string_view field = rest.substr(0, end);
    while (end < rest.size() && is_blank(rest[end])) {
      ++end;
    }
    rest.remove_prefix(end);
    done = rest.empty();
    return field;
  }
};

bool parse_field(std::string_view field, char kind, int64_t& out) {
  if (field.size() > 1 && field[0] == '+' && field[1] != '-') {
    field.remove_prefix(1);
  }
  const char* const end = field.data() + field.size();
  if (kind == 'i') {
    const auto result = std::from_chars(field.data(), end, out);
    return result.ec == std::errc{} && result.ptr == end && !field.empty();
  }
  double value = 0;
  const auto result = std::from_chars(field.data(), end, value);
  std::memcpy(&out, &value, sizeof(value));
  return result.ec == std::errc{} && result.ptr == end && !field.empty();
}

std::string wrong_field(size_t i, char kind, std::string_view field) {
  return "field " + std::to_string(i + 1) + " must be " + (kind == 'i' ? "an integer" : "a number") + ", got '" +
         std::string(field.substr(0, kQuotedBytes)) + "'";
}

// Appends the line's values; what is wrong with it, or nothing.
std::string parse_line(std::string_view line, const Format& format, std::vector<int64_t>& values) {
  const size_t comment = line.find_first_of("#%");
  line = trim(line.substr(0, comment));
  if (line.empty()) {
    return {};
  }
  size_t num_fields = 0;
  std::string error;
  for (bool done = false; !done; ++num_fields) {
    const std::string_view field = format.next(line, done);
    int64_t value = 0;
    if (num_fields < format.kinds.size()) {
      if (!parse_field(field, format.kinds[num_fields], value) && error.empty()) {
        error = wrong_field(num_fields, format.kinds[num_fields], field);
      }
      values.push_back(value);
    }
  }
  if (num_fields != format.kinds.size()) {
    return "expected " + std::to_string(format.kinds.size()) + " fields, got " + std::to_string(num_fields);
  }
  return error;
}

// The end of a run of at most 18 digits, which cannot overflow, or nullptr.
const char* plain_integer(const char* p, const char* end, int64_t& out) {
  const char* const begin = p;
  uint64_t value = 0;  // may wrap where there are too many digits
  for (; p != end && *p >= '0' && *p <= '9'; ++p) {
    value = value * 10 + static_cast<uint64_t>(*p - '0');
  }
  out = static_cast<int64_t>(value);
  return p == begin || p - begin > 18 ? nullptr : p;
}

// A line of plain numbers in one go: appends its values and returns where the next line begins. nullptr, with nothing
// appended, for whatever looks different; parse_line then says what it is.
const char* plain_line(const char* p, const char* end, const Format& format, std::vector<int64_t>& values) {
  const size_t size = values.size(), last = format.kinds.size() - 1;
  const auto skip_blanks = [&] {
    while (p != end && is_blank(*p) && *p != format.delimiter) {
      ++p;
    }
  };
  for (size_t field = 0; field <= last; ++field) {
    skip_blanks();
    int64_t value = 0;
    if (format.kinds[field] == 'i') {
      p = plain_integer(p, end, value);
    } else {
      double number = 0;
      const auto result = std::from_chars(p, end, number);
      std::memcpy(&value, &number, sizeof(number));
      p = result.ec == std::errc{} ? result.ptr : nullptr;
    }
    if (p == nullptr) {
      break;
    }
    const char* const after = p;
    skip_blanks();
    const bool ends = p == end || *p == '\n';
    const bool separated = !ends && (format.delimiter == 0 ? p != after : *p == format.delimiter);
    if (field == last ? !ends : !separated) {
      p = nullptr;
      break;
    }
    p += field == last ? p != end : format.delimiter != 0;
    values.push_back(value);
  }
  if (p == nullptr) {
    values.resize(size);
  }
  return p;
}

Rows parse_range(std::string_view text, const Format& format) {
  Rows rows;
  while (!text.empty()) {
    if (const char* next = plain_line(text.data(), text.data() + text.size(), format, rows.values)) {
      text.remove_prefix(static_cast<size_t>(next - text.data()));
      ++rows.num_lines;
      continue;
    }
    const auto* newline = static_cast<const char*>(std::memchr(text.data(), '\n', text.size()));
    const size_t size = newline == nullptr ? text.size() : static_cast<size_t>(newline - text.data());
    ++rows.num_lines;
    rows.error = parse_line(text.substr(0, size), format, rows.values);
    if (!rows.error.empty()) {
      break;
    }
    text.remove_prefix(newline == nullptr ? size : size + 1);
  }
  return rows;
}

// Where share s begins: after the first line's end at or behind its even split.
int64_t line_start(std::string_view text, int s, int num_shares) {
  const int64_t share = share_of(static_cast<int64_t>(text.size()), s, num_shares).begin;
  if (share == 0 || share == static_cast<int64_t>(text.size())) {
    return share;
  }
  const size_t newline = text.find('\n', static_cast<size_t>(share) - 1);
  return static_cast<int64_t>(newline == std::string_view::npos ? text.size() : newline + 1);
}

template <typename Convert>
void copy_column(const std::vector<Rows>& ranges, size_t field, size_t num_fields, const Convert& convert) {
  int64_t row = 0;
  for (const Rows& rows : ranges) {
    for (size_t i = field; i < rows.values.size(); i += num_fields) {
      convert(row++, rows.values[i]);
    }
  }
}

// -> a column per field: int64 for 'i', float32 for 'f'. Errors say "line N", the text's first line being first_line.
std::vector<Tensor> parse_table(const Tensor& text, std::string kinds, int64_t delimiter, int64_t first_line) {
  check_vector(text, "text");
  check_dtype(text, ScalarType::Byte, "text");
  CHECK_ARG(!kinds.empty() && kinds.find_first_not_of("if") == std::string::npos, "kinds must be letters i and f");
  CHECK_ARG(delimiter >= 0 && delimiter < 128 && delimiter != '\n', "delimiter must be a character or 0 for blanks");
  CHECK_ARG(first_line >= 0 && first_line <= kMostLines, "first_line must be in [0, 2^62], got ", first_line);
  const Format format{kinds, static_cast<char>(delimiter)};
  const std::string_view all(static_cast<const char*>(text.const_data_ptr()), static_cast<size_t>(text.numel()));
  const int shares = num_shares_for(text.numel(), kBytesPerThread);
  std::vector<Rows> ranges(shares);
  for_shares(shares, [&](int s, int n) {
    const int64_t begin = line_start(all, s, n), end = line_start(all, s + 1, n);
    ranges[s] = parse_range(all.substr(static_cast<size_t>(begin), static_cast<size_t>(end - begin)), format);
  });
  int64_t line = first_line - 1, num_rows = 0;
  for (const Rows& rows : ranges) {
    line += rows.num_lines;
    CHECK_ARG(rows.error.empty(), "line ", line, ": ", rows.error);
    num_rows += static_cast<int64_t>(rows.values.size() / kinds.size());
  }
  std::vector<Tensor> columns;
  for (size_t field = 0; field < kinds.size(); ++field) {
    const bool integer = kinds[field] == 'i';
    const Tensor column = empty_cpu({num_rows}, integer ? ScalarType::Long : ScalarType::Float);
    if (integer) {
      auto* const out = mutable_data<int64_t>(column);
      copy_column(ranges, field, kinds.size(), [&](int64_t row, int64_t bits) { out[row] = bits; });
    } else {
      auto* const out = mutable_data<float>(column);
      copy_column(ranges, field, kinds.size(), [&](int64_t row, int64_t bits) {
        double value = 0;
        std::memcpy(&value, &bits, sizeof(value));
        out[row] = static_cast<float>(value);
      });
    }
    columns.push_back(column);
  }
  return columns;
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "parse_table", &gnnsys::parse_table); }
