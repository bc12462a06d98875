// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <linattn/io/array.hpp>
#include <linattn/io/reader.hpp>
#include <linattn/io/value.hpp>
#include <linattn/problem.hpp>
#include <map>
#include <string>
#include <string_view>
#include <vector>

/// \file tensor_file.hpp
/// A file in layout version 1 (docs/hdf5-layout.md), read and checked as a whole.

namespace LinAttn::io {

/// The value of the root attribute `schema`.
inline constexpr const char* schema_name = "linattn-1";

/// How to read a file and what overrides it.
struct ReadOptions {
  ReadLimits limits{};
  /// Variant to use instead of the file's; empty: the file's. With another variant than the file's
  /// only `causal`, `normalise` and, unless one of them has a `scale` of its own, `scale` of /config
  /// are kept, and states and expected results, which belong to the file's variant, are left out.
  std::string variant{};
  /// Attributes of /config to use instead of the file's, by name. `alpha` or `beta` replaces
  /// `moments` and `moments` replaces both.
  std::map<std::string, Value> config{};
};

/// The settings of /config with every default filled in.
class Config {
 public:
  /// Whether the attribute or the dataset has a value.
  bool has(const std::string& name) const;

  /// \throws InvalidArgument if there is no such setting or it is of another kind.
  bool flag(const std::string& name) const;
  std::int64_t integer(const std::string& name) const;
  std::uint64_t counter(const std::string& name) const;
  double real(const std::string& name) const;
  const std::string& text(const std::string& name) const;

  /// One value for each of `count` heads, from the dataset or repeated from the attribute.
  std::vector<double> per_head(const std::string& name, std::int64_t count) const;

  /// Attributes, defaults included.
  const std::map<std::string, Value>& values() const noexcept { return m_values; }
  /// Datasets of /config.
  const std::map<std::string, Array>& arrays() const noexcept { return m_arrays; }

 private:
  friend class TensorFileParser;
  const Value& at(const std::string& name) const;

  std::string m_file;
  std::map<std::string, Value> m_values;
  std::map<std::string, Array> m_arrays;
};

/// Relative tolerances by type of the computation.
struct Tolerances {
  double f64 = 1e-11;
  double f32 = 2e-5;
  double f16 = 4e-3;
  double bf16 = 3e-2;
};

/// Content of one file.
///
/// Reading checks the schema, the variant, every attribute of /config, the types and extents of all
/// datasets against each other, masks and packed offsets, and that a causal problem has Nq <= Nk.
/// What is present afterwards needs no further check.
class TensorFile {
 public:
  /// \throws InvalidArgument if the content breaks the layout (file, path, expected and found in
  /// one line). \throws EnvironmentFailure if the file cannot be opened.
  static TensorFile read(const std::filesystem::path& file, const ReadOptions& options = {});

  const std::filesystem::path& file() const noexcept { return m_file; }

  /// Root attribute `producer`, empty if absent.
  const std::string& producer() const noexcept { return m_producer; }
  /// The variant in effect; empty if neither the file nor the options name one.
  const std::string& variant() const noexcept { return m_variant; }
  /// The file's own variant; empty if it names none.
  const std::string& file_variant() const noexcept { return m_file_variant; }
  /// Root attributes that are single numbers or strings.
  const std::map<std::string, Value>& attributes() const noexcept { return m_attributes; }

  const Config& config() const noexcept { return m_config; }
  const Problem& problem() const noexcept { return m_problem; }
  bool causal() const { return m_config.flag("causal"); }

  /// Whether cu_seqlens_q and cu_seqlens_k are given.
  bool packed() const noexcept { return m_packed; }
  /// B, or the number of packed sequences: the first extent of every state.
  std::int64_t members() const noexcept { return m_members; }

  /// Datasets by path, as "/inputs/q". nullptr if absent.
  const Array* find(const std::string& path) const;
  bool has(const std::string& path) const { return find(path) != nullptr; }
  /// \throws InvalidArgument naming the file and the path if it is absent.
  const Array& at(const std::string& path) const;
  /// Names of the datasets directly in a group that were read, sorted; empty if there is no such
  /// group.
  std::vector<std::string> names(const std::string& group) const;

  const Array& q() const { return at("/inputs/q"); }
  const Array& k() const { return at("/inputs/k"); }
  /// The keys if the variant ties values to keys.
  const Array& v() const { return m_tied ? k() : at("/inputs/v"); }

  /// Tolerances of /expected and of /expected_grad.
  const Tolerances& expected_tolerances() const noexcept { return m_expected_tolerances; }
  const Tolerances& gradient_tolerances() const noexcept { return m_gradient_tolerances; }

  /// Paths of datasets, groups and attributes that the layout does not know for this variant and
  /// that were therefore not read.
  const std::vector<std::string>& ignored() const noexcept { return m_ignored; }

 private:
  friend class TensorFileParser;
  TensorFile() = default;

  std::filesystem::path m_file;
  std::string m_producer;
  std::string m_variant;
  std::string m_file_variant;
  std::map<std::string, Value> m_attributes;
  Config m_config;
  Problem m_problem;
  bool m_packed = false;
  bool m_tied = false;
  std::int64_t m_members = 0;
  std::map<std::string, Array> m_arrays;
  Tolerances m_expected_tolerances;
  Tolerances m_gradient_tolerances;
  std::vector<std::string> m_ignored;
};

}  // namespace LinAttn::io
