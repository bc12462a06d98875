// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// \file text.hpp
/// Numbers and names as people read them.

namespace LinAttn::app {

/// The text on one line: runs of line breaks and other control characters become one space.
std::string one_line(std::string_view text);

/// "a, b, c".
std::string join(const std::vector<std::string>& parts, std::string_view separator = ", ");

/// As printf("%.<digits>g").
std::string number(double value, int digits = 6);

/// A number with the digits that restore it.
std::string exact(double value);

/// "412 us", "13.1 ms", "2.04 s".
std::string duration(double seconds);

/// "123 bytes", "1.5 KiB", "20.3 MiB".
std::string bytes(std::size_t count);

/// "[0, 3, 5, 1]"; "" for a scalar.
std::string index_text(std::span<const std::int64_t> index);

/// The text followed by blanks up to `width`, and at least one.
std::string padded(std::string_view text, std::size_t width);

}  // namespace LinAttn::app
