// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/io/array.hpp>
#include <linattn/io/value.hpp>
#include <map>
#include <string>
#include <vector>

/// \file files.hpp
/// Small files in the layout, and copies of others with something changed.

namespace LinAttn::test_app {

/// Everything a file holds, in memory.
struct Contents {
  std::map<std::string, std::map<std::string, io::Value>> attributes;  ///< by object
  std::map<std::string, io::Array> datasets;                           ///< by path

  static Contents read(const std::string& file);
  void write(const std::string& file) const;

  io::Array& operator[](const std::string& path) { return datasets.at(path); }
};

/// A plain input of variant elu: q (2,4,3,2), k (2,2,5,2), v (2,2,5,1), a cotangent, no
/// expectation.
Contents small_input();

/// Values that differ from element to element.
io::Array ramp(const std::vector<std::int64_t>& extents);

/// Values without a pattern, all of them different: the sines of some multiples.
io::Array waves(const std::vector<std::int64_t>& extents, double phase);

/// Tokens begin to end - 1 of an array (., ., N, .) of float64.
io::Array tokens(const io::Array& array, std::int64_t begin, std::int64_t end);

/// One dataset of a file as float64.
std::vector<double> values(const std::string& file, const std::string& path);

/// max |a - b| / max |a|.
double relative_distance(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace LinAttn::test_app
