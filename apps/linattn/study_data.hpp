// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/io/value.hpp>
#include <map>
#include <string>
#include <vector>

#include "json_output.hpp"

/// \file study_data.hpp
/// The numbers of a study by their path in its file, which can be read again.

namespace LinAttn::app {

/// Datasets of real numbers (NaN: not measured) and attributes, all below /study.
class StudyData {
 public:
  struct Dataset {
    std::vector<std::int64_t> extents;
    std::vector<double> values;
  };

  /// \throws InvalidArgument if the file is not one of linattn study
  static StudyData read(const std::string& file);
  /// Replaces the file when all is written.
  void write(const std::string& file) const;
  /// {"study": {...}} with objects for groups; arrays in arrays, null for NaN.
  void add_to(Json& document) const;

  /// The dataset of that path ("table2/lln/seconds"), made of NaN if it is absent.
  Dataset& dataset(const std::string& path, const std::vector<std::int64_t>& extents);
  const Dataset* find(const std::string& path) const;
  void set(const std::string& path, const std::vector<std::int64_t>& extents, std::vector<double> values);

  /// Attributes of a group ("": of /study itself).
  void attribute(const std::string& group, const std::string& name, const io::Value& value);
  const io::Value* find_attribute(const std::string& group, const std::string& name) const;

 private:
  std::map<std::string, Dataset> m_datasets;
  std::map<std::string, std::map<std::string, io::Value>> m_attributes;
};

}  // namespace LinAttn::app
