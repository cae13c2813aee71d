// Pages: geometry, encode against a reference written from docs/table_format.md, and every kind of damage found.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "common/crc32c.h"
#include "engram/pages.h"
#include "pages/page_codec.h"

namespace {

using Bytes = std::vector<uint8_t>;

Bytes random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

engram_page_format make_format(uint32_t row_bytes, uint32_t value_bytes, uint64_t rows) {
  engram_page_format format{};
  for (uint8_t i = 0; i < 16; i++) format.table_id[i] = static_cast<uint8_t>(0xA0 + i);
  format.generation = 3;
  format.rows = rows;
  format.layer = 14;
  format.row_bytes = row_bytes;
  format.value_bytes = value_bytes;
  return format;
}

void append(Bytes& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) out.push_back(static_cast<uint8_t>(value >> (8 * i)));
}

// The checksum of a row by the words of the format, without the streams and shifts of the real one.
uint32_t reference_checksum(const engram_page_format& format, uint64_t row, const uint8_t* bytes) {
  Bytes message(format.table_id, format.table_id + 16);
  append(message, format.generation, 8);
  append(message, format.layer, 4);
  append(message, 0, 4);
  append(message, row, 8);
  REQUIRE(message.size() == 40);
  message.insert(message.end(), bytes, bytes + format.row_bytes);
  const uint32_t crc = engram::crc32c_portable(0, message.data(), message.size());
  return crc != 0 ? crc : 1;
}

Bytes reference_page(const engram_page_format& format, uint64_t page, const uint8_t* values, const uint8_t* scales) {
  const uint32_t page_bytes = engram_page_bytes(format.row_bytes), slots = engram_rows_per_page(format.row_bytes);
  const uint32_t scale_bytes = format.row_bytes - format.value_bytes;
  const uint64_t first = page * slots, rows = std::min<uint64_t>(slots, format.rows - first);
  Bytes out, checksums;
  for (uint64_t slot = 0; slot < rows; slot++) {
    out.insert(out.end(), values + slot * format.value_bytes, values + (slot + 1) * format.value_bytes);
    if (scale_bytes != 0) out.insert(out.end(), scales + slot * scale_bytes, scales + (slot + 1) * scale_bytes);
    append(checksums, reference_checksum(format, first + slot, out.data() + slot * format.row_bytes), 4);
  }
  out.resize(page_bytes - 64 - 4 * slots);
  checksums.resize(4 * slots);
  out.insert(out.end(), checksums.begin(), checksums.end());
  for (char c : {'E', 'N', 'G', 'R', 'P', 'A', 'G', 'E'}) out.push_back(static_cast<uint8_t>(c));
  append(out, 1, 2);
  append(out, rows, 2);
  append(out, format.layer, 4);
  append(out, format.generation, 8);
  append(out, page, 8);
  out.insert(out.end(), format.table_id, format.table_id + 16);
  append(out, format.row_bytes, 4);
  append(out, 0, 8);
  const size_t begin = page_bytes - 64 - 4 * slots;
  append(out, engram::crc32c_portable(0, out.data() + begin, out.size() - begin), 4);
  return out;
}

struct Layer {
  engram_page_format format;
  Bytes values, scales, pages;
  uint64_t page_count;

  Layer(uint32_t row_bytes, uint32_t value_bytes, uint64_t rows)
      : format(make_format(row_bytes, value_bytes, rows)),
        values(random_bytes(rows * value_bytes, 1)),
        scales(random_bytes(rows * (row_bytes - value_bytes), 2)) {
    const uint64_t slots = engram_rows_per_page(row_bytes);
    page_count = (rows + slots - 1) / slots;
    pages.assign(page_count * engram_page_bytes(row_bytes), 0xEE);  // what encode must not leave behind
    REQUIRE(engram_pages_encode(&format, 0, page_count, values.data(), scales.empty() ? nullptr : scales.data(),
                                pages.data()) == 0);
  }

  int64_t verify(std::vector<engram_page_fault>* faults = nullptr) const { return verify_as(format, faults); }

  int64_t verify_as(const engram_page_format& as, std::vector<engram_page_fault>* faults = nullptr) const {
    std::vector<engram_page_fault> found(page_count);
    const int64_t bad = engram_pages_verify(&as, 0, page_count, pages.data(), found.data(), found.size());
    found.resize(static_cast<size_t>(std::max<int64_t>(bad, 0)));
    if (faults != nullptr) *faults = found;
    return bad;
  }
};

struct Shape {
  uint32_t row_bytes, value_bytes;
  uint64_t rows;
};
constexpr Shape kShapes[] = {{264, 256, 100}, {16, 16, 500},   {16, 8, 201},    {17, 1, 333},      {23, 20, 150},
                             {24, 24, 145},   {160, 160, 25},  {272, 256, 1},   {1000, 999, 13},   {4028, 4000, 3},
                             {4029, 4029, 2}, {8124, 8000, 2}, {8125, 8125, 2}, {65536, 65000, 2}, {65536, 65536, 1}};

}  // namespace

TEST_CASE("geometry") {
  CHECK(engram_page_bytes(264) == 4096);
  CHECK(engram_rows_per_page(264) == 15);
  CHECK(engram_rows_per_page(16) == 201);
  CHECK(engram_page_bytes(4028) == 4096);
  CHECK(engram_rows_per_page(4028) == 1);
  CHECK(engram_page_bytes(4029) == 8192);
  CHECK(engram_rows_per_page(4029) == 1);
  CHECK(engram_page_bytes(65536) == 69632);
  for (uint32_t row_bytes : {0u, 15u, 65537u, 0xFFFFFFFFu}) {
    CHECK(engram_page_bytes(row_bytes) == 0);
    CHECK(engram_rows_per_page(row_bytes) == 0);
  }
  for (uint32_t row_bytes = 16; row_bytes <= 65536; row_bytes++) {
    const uint64_t slots = engram_rows_per_page(row_bytes), page_bytes = engram_page_bytes(row_bytes);
    REQUIRE(slots * (row_bytes + 4) + 64 <= page_bytes);
    REQUIRE(page_bytes % 4096 == 0);
    REQUIRE((page_bytes == 4096 || row_bytes + 68 > page_bytes - 4096));
    REQUIRE((page_bytes > 4096 || (slots + 1) * (row_bytes + 4) + 64 > page_bytes));
  }
}

TEST_CASE("the checksum of a row is the format's, at every size and alignment") {
  const Bytes bytes = random_bytes(65536 + 8, 3);
  for (uint32_t row_bytes = 16; row_bytes <= 65536; row_bytes += row_bytes < 700 ? 1 : 4999) {
    const engram_page_format format = make_format(row_bytes, row_bytes, 1);
    const engram::RowSeed seed = engram::make_row_seed(format);
    for (uint64_t row : {uint64_t{0}, uint64_t{1}, uint64_t{0x1FFFFFFFF}, (uint64_t{1} << 40) - 1}) {
      const uint8_t* at = bytes.data() + row_bytes % 8;
      const uint32_t expected = reference_checksum(format, row, at);
      REQUIRE(engram::row_checksum(seed, row, at) == expected);
      REQUIRE(engram::row_matches(seed, row, at, row_bytes, expected));
      REQUIRE_FALSE(engram::row_matches(seed, row + 1, at, row_bytes, expected));
      REQUIRE_FALSE(engram::row_matches(seed, row, at, row_bytes, 0));
      REQUIRE_FALSE(engram::row_matches(seed, row, at, row_bytes + 1, expected));
    }
  }
}

TEST_CASE("a checksum that comes out as zero is stored as one") {
  // Any four bytes at the end of a message can be chosen for a wanted CRC: the map from them to the CRC is affine over
  // GF(2), so solve it.
  const engram_page_format format = make_format(264, 256, 1);
  const engram::RowSeed seed = engram::make_row_seed(format);
  Bytes row = random_bytes(264, 4);
  const auto crc = [&](uint32_t tail) {
    std::memcpy(row.data() + 260, &tail, 4);
    Bytes message(format.table_id, format.table_id + 16);
    append(message, format.generation, 8);
    append(message, format.layer, 4);
    append(message, 0, 4);
    append(message, 0, 8);
    message.insert(message.end(), row.begin(), row.end());
    return engram::crc32c_portable(0, message.data(), message.size());
  };
  const uint32_t constant = crc(0);
  uint32_t wanted = constant, tail = 0;  // the XOR of columns that gives `constant` leaves a CRC of zero
  uint32_t columns[32], choice[32];
  for (int i = 0; i < 32; i++) {
    columns[i] = crc(1u << i) ^ constant;
    choice[i] = 1u << i;
  }
  for (int bit = 31, used = 0; bit >= 0; bit--) {
    int pivot = used;
    while (pivot < 32 && ((columns[pivot] >> bit) & 1) == 0) pivot++;
    REQUIRE(pivot < 32);
    std::swap(columns[pivot], columns[used]);
    std::swap(choice[pivot], choice[used]);
    for (int i = 0; i < 32; i++) {
      if (i != used && ((columns[i] >> bit) & 1) != 0) {
        columns[i] ^= columns[used];
        choice[i] ^= choice[used];
      }
    }
    used++;
  }
  for (int i = 0; i < 32; i++) {
    if ((wanted & columns[i]) != 0) tail ^= choice[i];  // the columns are unit vectors now
  }
  REQUIRE(crc(tail) == 0);
  CHECK(engram::row_checksum(seed, 0, row.data()) == 1);
  CHECK(engram::row_matches(seed, 0, row.data(), 264, 1));
  CHECK_FALSE(engram::row_matches(seed, 0, row.data(), 264, 0));
}

TEST_CASE("encode writes the pages of the format") {
  for (const Shape& shape : kShapes) {
    CAPTURE(shape.row_bytes);
    CAPTURE(shape.value_bytes);
    const Layer layer(shape.row_bytes, shape.value_bytes, shape.rows);
    const uint64_t slots = engram_rows_per_page(shape.row_bytes), page_bytes = engram_page_bytes(shape.row_bytes);
    const uint32_t scale_bytes = shape.row_bytes - shape.value_bytes;
    for (uint64_t page = 0; page < layer.page_count; page++) {
      const Bytes expected = reference_page(layer.format, page, layer.values.data() + page * slots * shape.value_bytes,
                                            layer.scales.data() + page * slots * scale_bytes);
      REQUIRE(expected.size() == page_bytes);
      REQUIRE(std::equal(expected.begin(), expected.end(), layer.pages.begin() + static_cast<long>(page * page_bytes)));
    }
    CHECK(layer.verify() == 0);
  }
}

TEST_CASE("pages encoded in two calls are those of one") {
  const Layer layer(264, 256, 100);
  Bytes out(layer.pages.size() - 3 * 4096);
  REQUIRE(engram_pages_encode(&layer.format, 3, layer.page_count - 3, layer.values.data() + 45 * 256,
                              layer.scales.data() + 45 * 8, out.data()) == 0);
  CHECK(std::equal(out.begin(), out.end(), layer.pages.begin() + 3 * 4096));
  CHECK(engram_pages_verify(&layer.format, 3, layer.page_count - 3, out.data(), nullptr, 0) == 0);
}

TEST_CASE("every flipped bit is found, and named") {
  for (const Shape& shape : {Shape{264, 256, 22}, Shape{16, 16, 210}, Shape{4029, 4000, 1}}) {
    Layer layer(shape.row_bytes, shape.value_bytes, shape.rows);
    const uint32_t page_bytes = engram_page_bytes(shape.row_bytes), slots = engram_rows_per_page(shape.row_bytes);
    const uint64_t page = layer.page_count - 1;  // a page with absent rows, where the shape has one
    const uint64_t rows = shape.rows - page * slots;
    for (size_t bit = 0; bit < size_t{page_bytes} * 8; bit++) {
      const size_t byte = bit / 8;
      uint8_t* at = &layer.pages[page * page_bytes + byte];
      *at = static_cast<uint8_t>(*at ^ (1 << bit % 8));
      std::vector<engram_page_fault> faults;
      REQUIRE(layer.verify(&faults) == 1);
      *at = static_cast<uint8_t>(*at ^ (1 << bit % 8));
      REQUIRE(faults[0].page == page);
      const size_t checksums = page_bytes - 64 - 4 * slots;
      if (byte < rows * shape.row_bytes) {
        REQUIRE(faults[0].reason == ENGRAM_FAULT_ROW);
        REQUIRE(faults[0].row == page * slots + byte / shape.row_bytes);
      } else if (byte < checksums) {
        REQUIRE(faults[0].reason == ENGRAM_FAULT_PADDING);
        REQUIRE(faults[0].row == UINT64_MAX);
      } else if (byte < checksums + rows * 4) {
        REQUIRE(faults[0].reason == ENGRAM_FAULT_ROW);
      } else {
        REQUIRE(faults[0].reason == ENGRAM_FAULT_TRAILER);
      }
    }
  }
}

TEST_CASE("a page elsewhere, of another generation, layer or table, and a page of zeros are bad") {
  Layer layer(264, 256, 45);
  std::vector<engram_page_fault> faults;
  SUBCASE("swapped pages") {
    std::swap_ranges(layer.pages.begin(), layer.pages.begin() + 4096, layer.pages.begin() + 4096);
    CHECK(layer.verify(&faults) == 2);
    CHECK(faults[0].row == 0);
    CHECK(faults[1].row == 15);
  }
  SUBCASE("zeros") {
    std::fill_n(layer.pages.begin() + 4096, 4096, uint8_t{0});
    CHECK(layer.verify(&faults) == 1);
    CHECK(faults[0].page == 1);
    CHECK(faults[0].reason == ENGRAM_FAULT_ROW);
  }
  engram_page_format other = layer.format;
  SUBCASE("generation") {
    other.generation = 2;
    CHECK(layer.verify_as(other) == 3);
  }
  SUBCASE("layer") {
    other.layer = 1;
    CHECK(layer.verify_as(other) == 3);
  }
  SUBCASE("table") {
    other.table_id[15] ^= 1;
    CHECK(layer.verify_as(other) == 3);
  }
  SUBCASE("every row of them, not just the first") {
    const engram::RowSeed mine = engram::make_row_seed(layer.format);
    const engram::PageLayout layout(264);
    for (uint32_t slot = 0; slot < 15; slot++) {
      const uint8_t* row = layer.pages.data() + layout.row_offset(slot);
      const uint32_t stored = layout.stored_checksum(layer.pages.data(), slot);
      CHECK(engram::row_matches(mine, slot, row, 264, stored));
      for (uint64_t elsewhere = 0; elsewhere < 5000; elsewhere++) {
        REQUIRE(engram::row_matches(mine, elsewhere, row, 264, stored) == (elsewhere == slot));
      }
      other = layer.format;
      for (other.generation = 0; other.generation < 3; other.generation++) {
        REQUIRE_FALSE(engram::row_matches(engram::make_row_seed(other), slot, row, 264, stored));
      }
    }
  }
}

TEST_CASE("a fault list shorter than the faults still counts them all") {
  Layer layer(264, 256, 45);
  std::fill(layer.pages.begin(), layer.pages.end(), uint8_t{0});
  engram_page_fault fault[2] = {{9, 9, 9, 9}, {9, 9, 9, 9}};
  CHECK(engram_pages_verify(&layer.format, 0, 3, layer.pages.data(), fault, 1) == 3);
  CHECK(fault[0].page == 0);
  CHECK(fault[1].page == 9);
}

TEST_CASE("compare finds the first row of each page that differs from the source") {
  Layer layer(264, 256, 100);
  engram_page_fault faults[8];
  const auto compare = [&] {
    return engram_pages_compare(&layer.format, 0, layer.page_count, layer.pages.data(), layer.values.data(),
                                layer.scales.data(), faults, 8);
  };
  CHECK(compare() == 0);
  layer.values[17 * 256 + 255] ^= 1;
  layer.scales[20 * 8] ^= 1;
  layer.scales[99 * 8 + 7] ^= 1;
  CHECK(compare() == 2);
  CHECK(faults[0].page == 1);
  CHECK(faults[0].row == 17);
  CHECK(faults[0].reason == ENGRAM_FAULT_SOURCE);
  CHECK(faults[1].page == 6);
  CHECK(faults[1].row == 99);
}

TEST_CASE("bad arguments are refused, and nothing is touched") {
  const Layer layer(264, 256, 45);
  Bytes out(4096 * 3, 7);
  const auto encode = [&](engram_page_format format, uint64_t first, uint64_t count) {
    return engram_pages_encode(&format, first, count, layer.values.data(), layer.scales.data(), out.data());
  };
  engram_page_format format = layer.format;
  CHECK(encode(format, 0, 4) == -1);
  CHECK(encode(format, 3, 1) == -1);
  CHECK(encode(format, UINT64_MAX, 2) == -1);
  CHECK(encode(format, 1, UINT64_MAX) == -1);
  CHECK(encode(format, 3, 0) == 0);
  for (uint32_t row_bytes : {0u, 15u, 65537u}) {
    format.row_bytes = row_bytes;
    CHECK(encode(format, 0, 1) == -1);
  }
  format = layer.format;
  format.value_bytes = 0;
  CHECK(encode(format, 0, 1) == -1);
  format.value_bytes = 265;
  CHECK(encode(format, 0, 1) == -1);
  format = layer.format;
  format.rows = 0;
  CHECK(encode(format, 0, 1) == -1);
  format.rows = (uint64_t{1} << 40) + 1;
  CHECK(encode(format, 0, 1) == -1);
  format = layer.format;
  CHECK(engram_pages_encode(nullptr, 0, 1, layer.values.data(), layer.scales.data(), out.data()) == -1);
  CHECK(engram_pages_encode(&format, 0, 1, layer.values.data(), nullptr, out.data()) == -1);
  CHECK(engram_pages_verify(&format, 0, 1, nullptr, nullptr, 0) == -1);
  CHECK(engram_pages_verify(&format, 0, 4, layer.pages.data(), nullptr, 0) == -1);
  CHECK(engram_pages_compare(&format, 0, 1, layer.pages.data(), nullptr, layer.scales.data(), nullptr, 0) == -1);
  CHECK(std::all_of(out.begin(), out.end(), [](uint8_t byte) { return byte == 7; }));
}
