// SPDX-License-Identifier: BSD-3-Clause
#include "files.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <linattn/io/reader.hpp>
#include <linattn/io/writer.hpp>

namespace LinAttn::test_app {
namespace {

void read_object(const io::Reader& reader, const std::string& path, Contents& contents) {
  for (const std::string& name : reader.attribute_names(path))
    contents.attributes[path].emplace(name, reader.attribute(path, name));
  if (reader.kind(path) == io::ObjectKind::dataset) {
    contents.datasets.emplace(path, reader.read(path));
    return;
  }
  for (const std::string& name : reader.children(path))
    read_object(reader, (path == "/" ? "" : path) + "/" + name, contents);
}

}  // namespace

Contents Contents::read(const std::string& file) {
  Contents contents;
  read_object(io::Reader(file), "/", contents);
  return contents;
}

void Contents::write(const std::string& file) const {
  io::Writer writer(file);
  for (const auto& [path, array] : datasets) writer.write(path, array);
  for (const auto& [object, named] : attributes)
    for (const auto& [name, value] : named) writer.attribute(object, name, value);
  writer.commit();
}

Contents small_input() {
  Contents contents;
  contents.attributes["/"] = {{"variant", "elu"}, {"producer", "tests/app"}, {"note", 0.25}};
  contents.datasets = {{"/inputs/q", ramp({2, 4, 3, 2})},
                       {"/inputs/k", ramp({2, 2, 5, 2})},
                       {"/inputs/v", ramp({2, 2, 5, 1})},
                       {"/cotangent/o", ramp({2, 4, 3, 1})}};
  return contents;
}

io::Array ramp(const std::vector<std::int64_t>& extents) {
  io::Array array(io::ElementType::f64, extents);
  const auto elements = array.values<double>();
  for (std::size_t i = 0; i < elements.size(); ++i)
    elements[i] = static_cast<double>(i % 7) / 8 - 0.375;
  return array;
}

io::Array waves(const std::vector<std::int64_t>& extents, double phase) {
  io::Array array(io::ElementType::f64, extents);
  const auto elements = array.values<double>();
  for (std::size_t i = 0; i < elements.size(); ++i)
    elements[i] = 1.5 * std::sin(phase + 1.7 * static_cast<double>(i));
  return array;
}

io::Array tokens(const io::Array& array, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> extents = array.extents();
  const std::int64_t n = extents[2], row = extents[3], count = (end - begin) * row;
  extents[2] = end - begin;
  io::Array piece(io::ElementType::f64, extents);
  const auto from = array.values<double>();
  const auto to = piece.values<double>();
  for (std::int64_t head = 0; head < extents[0] * extents[1]; ++head)
    std::copy_n(from.begin() + (head * n + begin) * row, count, to.begin() + head * count);
  return piece;
}

std::vector<double> values(const std::string& file, const std::string& path) {
  return io::Reader(file).read(path).as<double>();
}

double relative_distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) || std::isnan(b[i])) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(a[i]));
  }
  return largest > 0 ? difference / largest : difference;
}

}  // namespace LinAttn::test_app
