// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/io/value.hpp>
#include <linattn/io/variant_table.hpp>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// \file settings.hpp
/// The attributes of /config as a job has them.

namespace LinAttn::app {

/// The attributes that a variant of the layout has; none for a variant that the layout does not
/// have.
inline std::vector<io::AttributeSpec> settings_of_variant(std::string_view variant) {
  if (const io::VariantSpec* spec = io::find_variant(variant)) return io::attributes_of(*spec);
  return {};
}

/// Values by the names of the layout's table, defaults filled in. A question may say what holds for
/// a variant that has no such attribute.
class Settings {
 public:
  Settings() = default;
  explicit Settings(std::map<std::string, io::Value> values) : m_values(std::move(values)) {}

  const std::map<std::string, io::Value>& values() const { return m_values; }
  bool has(const std::string& name) const { return m_values.contains(name); }

  bool flag(const std::string& name, bool otherwise) const {
    return has(name) ? m_values.at(name).as_int64() != 0 : otherwise;
  }
  double real(const std::string& name, double otherwise) const {
    return has(name) ? m_values.at(name).as_double() : otherwise;
  }
  std::int64_t integer(const std::string& name, std::int64_t otherwise) const {
    return has(name) ? m_values.at(name).as_int64() : otherwise;
  }
  std::uint64_t counter(const std::string& name, std::uint64_t otherwise) const {
    return has(name) ? m_values.at(name).as_uint64() : otherwise;
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    return has(name) ? m_values.at(name).as_string() : otherwise;
  }

 private:
  std::map<std::string, io::Value> m_values;
};

/// Whether alpha and beta are matched to moments of q and k, and head by head.
inline bool matches_moments(const Settings& settings) { return settings.has("moments"); }
inline bool matches_each_head(const Settings& settings) {
  return settings.text("moments_scope", "tensor") == "head";
}

/// Whether the parameter is one that is matched.
inline bool is_matched(const Settings& settings, std::string_view parameter) {
  return matches_moments(settings) && (parameter == "alpha" || parameter == "beta");
}

/// Whether `combine` gives the factors diag_r and diag_p a meaning.
inline bool uses_diag_r(const Settings& settings) {
  return settings.text("combine", "average") != "average";
}
inline bool uses_diag_p(const Settings& settings) {
  return settings.text("combine", "average") == "scale";
}

}  // namespace LinAttn::app
