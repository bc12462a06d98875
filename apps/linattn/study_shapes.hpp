// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/problem.hpp>
#include <string>
#include <string_view>
#include <vector>

/// \file study_shapes.hpp
/// The shapes that linattn study goes through.

namespace LinAttn::app {

struct StudyShape {
  Problem problem;
  bool causal = false;
};

struct ShapeList {
  std::string name;
  std::string about;  ///< whose shapes, and how they were made to fit
  std::vector<StudyShape> shapes;
};

/// "table2", "lra", "affine".
const std::vector<std::string>& shape_list_names();
/// \throws InvalidArgument for any other name
ShapeList shape_list(const std::string& name, bool quick);

/// The shape of "B,H,Hkv,N,D,Dv,causal", causal 0 or 1. \throws InvalidArgument
StudyShape parse_shape(const std::string& text);
/// The same the other way round.
std::string to_string(const StudyShape& shape);

/// The list "user" from a file with one shape in each line; what follows a # is a remark.
/// \throws InvalidArgument naming the line, EnvironmentFailure if the file cannot be read
ShapeList read_shapes(const std::string& file);

/// "table2: 1,12,12,512,64,64,0 ...; ..." of all lists.
std::string to_string(const std::vector<ShapeList>& lists);

}  // namespace LinAttn::app
