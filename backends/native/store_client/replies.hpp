// Takes the replies of a store's server out of the bytes of a connection; trusts nothing that came over the
// wire. No sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace collectives::store_client {

// The caller says what replies it awaits as a form, a letter for each: b = u8, u = u32, n = i64, v = value
// (u64 length, then its bytes), l = i64 count, then as many values.
class Replies {
 public:
  struct Field {
    char kind;
    std::int64_t number;     // of b, u, n; how many values of an l follow
    std::string_view bytes;  // of v; valid until the next call of another method
  };

  // Memory for the next bytes of the connection; `arrived` says how many have come. It grows only as they
  // do, whatever length the server has announced.
  std::span<char> room();
  void arrived(std::size_t bytes) noexcept { end_ += bytes; }

  // Looks for replies of another form, from the first byte that has not been taken. Throws
  // std::invalid_argument where it is no form.
  void expect(std::string_view form);
  // Whether all of them have come. Looks at each byte once. Throws ErrorKind::network at a length that cannot
  // be.
  bool complete();
  // Of replies that are complete: field `index` of `size()`.
  std::size_t size() const noexcept { return fields_.size(); }
  Field field(std::size_t index) const noexcept;
  // Forgets the bytes of the replies that are complete.
  void take() noexcept;

  // Bytes that have come and have not been taken, for what has no form.
  std::string_view held() const noexcept { return {data_.get() + begin_, end_ - begin_}; }
  void take(std::size_t bytes) noexcept;

 private:
  struct Found {
    char kind;
    std::int64_t number;
    std::size_t offset;  // from begin_
    std::size_t bytes;
  };

  bool next(char kind);

  std::unique_ptr<char[]> data_;
  std::size_t capacity_ = 0;
  std::size_t begin_ = 0;   // first byte that has not been taken
  std::size_t end_ = 0;     // behind the last that has come
  std::size_t cursor_ = 0;  // from begin_: behind the fields that have been found
  std::string_view form_;
  std::size_t step_ = 0;     // in form_
  std::int64_t listed_ = 0;  // values of a list that are still to come
  std::vector<Found> fields_;
};

}  // namespace collectives::store_client
