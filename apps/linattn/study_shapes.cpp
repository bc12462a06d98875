// SPDX-License-Identifier: BSD-3-Clause
#include "study_shapes.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <linattn/error.hpp>

#include "text.hpp"

namespace LinAttn::app {
namespace {

StudyShape square(std::int64_t batch, std::int64_t heads, std::int64_t n, std::int64_t d, bool causal) {
  return {{batch, heads, heads, n, n, d, d}, causal};
}

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

}  // namespace

const std::vector<std::string>& shape_list_names() {
  static const std::vector<std::string> names{"table2", "lra", "affine"};
  return names;
}

ShapeList shape_list(const std::string& name, bool quick) {
  if (name == "table2") {
    ShapeList list{name, "Table 2 of the LLN paper: attention of a model of 12 heads, D = 64, batch 1, full", {}};
    for (std::int64_t n = 512; n <= (quick ? 2048 : 16384); n *= 2) list.shapes.push_back(square(1, 12, n, 64, false));
    return list;
  }
  if (name == "lra") {
    const std::int64_t batch = quick ? 1 : 4;
    ShapeList list{name,
                   "Long Range Arena, 2 heads of D = 32, full: Text, ListOps, Retrieval, Pathfinder, Image; batch " +
                       std::to_string(batch) + " instead of the 32 to 256 of training",
                   {}};
    for (const std::int64_t n : {4096, 2048, 4096, 1024, 1024}) list.shapes.push_back(square(batch, 2, n, 32, false));
    return list;
  }
  if (name == "affine") {
    ShapeList list{name, "The lengths of the affine paper, D = 128, causal; B = 1, H = 2 instead of B = 4, H = 16", {}};
    for (const std::int64_t n : {1000, 1668, 2782, 4641, 7742, 12915, 21544, 35938, 59948, 100000})
      if (!quick || n < 4000) list.shapes.push_back(square(1, 2, n, 128, true));
    return list;
  }
  throw InvalidArgument("expected one of " + join(shape_list_names()) + ", found '" + name + "'");
}

StudyShape parse_shape(const std::string& text) {
  const auto refuse = [&](const std::string& reason) {
    throw InvalidArgument("expected B,H,Hkv,N,D,Dv,causal (such as 1,8,8,4096,64,64,0), found '" + text + "'" + reason);
  };
  std::vector<std::int64_t> numbers;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = trimmed(text.substr(begin, end - begin));
    std::int64_t value = 0;
    const auto [rest, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc() || rest != part.data() + part.size()) refuse("");
    numbers.push_back(value);
    begin = end + 1;
  }
  if (numbers.size() != 7) refuse("");
  if (numbers[6] != 0 && numbers[6] != 1) refuse(": causal is 0 or 1");
  if (*std::min_element(numbers.begin(), numbers.end() - 1) < 1) refuse(": extents are at least 1");
  const StudyShape shape{{numbers[0], numbers[1], numbers[2], numbers[3], numbers[3], numbers[4], numbers[5]},
                         numbers[6] == 1};
  try {
    shape.problem.validate(shape.causal);
  } catch (const InvalidArgument& error) {
    refuse(detail::message(": ", error.what()));
  }
  return shape;
}

std::string to_string(const StudyShape& shape) {
  const Problem& p = shape.problem;
  return detail::message(p.batch, ",", p.heads, ",", p.kv_heads, ",", p.nq, ",", p.d, ",", p.dv, ",",
                         shape.causal ? 1 : 0);
}

ShapeList read_shapes(const std::string& name) {
  std::ifstream file(name);
  if (!file)
    throw EnvironmentFailure(name + ": cannot be read; it is neither one of " + join(shape_list_names()) +
                             " nor a file of shapes");
  ShapeList list{"user", "The shapes of " + name, {}};
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::string text = trimmed(line.substr(0, line.find('#')));
    if (text.empty()) continue;
    try {
      list.shapes.push_back(parse_shape(text));
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(detail::message(name, ": line ", number, ": ", error.what()));
    }
  }
  if (list.shapes.empty()) throw InvalidArgument(name + ": expected shapes B,H,Hkv,N,D,Dv,causal, found none");
  return list;
}

std::string to_string(const std::vector<ShapeList>& lists) {
  std::vector<std::string> texts;
  for (const ShapeList& list : lists) {
    std::string text = list.name + ":";
    for (const StudyShape& shape : list.shapes) text += " " + to_string(shape);
    texts.push_back(text);
  }
  return join(texts, "; ");
}

}  // namespace LinAttn::app
