// SPDX-License-Identifier: BSD-3-Clause
#include "text.hpp"

#include <array>
#include <charconv>
#include <cstdio>

namespace LinAttn::app {

std::string one_line(std::string_view text) {
  std::string line;
  bool at_break = false;  // behind a line break, whose space also stands for those that follow
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_control = byte < 0x20 || byte == 0x7f;
    if (is_control && !line.empty() && line.back() != ' ') line += ' ';
    if (!is_control && !(at_break && c == ' ')) line += c;
    at_break = is_control || (at_break && c == ' ');
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty()) text += separator;
    text += part;
  }
  return text;
}

std::string number(double value, int digits) {
  std::array<char, 64> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.*g", digits, value);
  return buffer.data();
}

std::string exact(double value) {
  std::array<char, 64> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return {buffer.data(), end};
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return number(seconds * 1e6, 3) + " us";
  if (seconds < 1) return number(seconds * 1e3, 3) + " ms";
  return number(seconds, 3) + " s";
}

std::string bytes(std::size_t count) {
  if (count < 1024) return std::to_string(count) + " bytes";
  double value = static_cast<double>(count);
  const char* unit = "bytes";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return number(value, 4) + " " + unit;
}

std::string index_text(std::span<const std::int64_t> index) {
  if (index.empty()) return {};
  std::vector<std::string> parts;
  for (const std::int64_t i : index) parts.push_back(std::to_string(i));
  return "[" + join(parts) + "]";
}

std::string padded(std::string_view text, std::size_t width) {
  std::string result(text);
  result.append(result.size() < width ? width - result.size() : 1, ' ');
  return result;
}

}  // namespace LinAttn::app
