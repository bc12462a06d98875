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
/// The attributes of /config as a job has them, and which of them this version can use.

namespace LinAttn::app {

/// Whether this version computes what the attribute asks for.
constexpr bool is_supported_setting(std::string_view name) {
  return name != "moments" && name != "moments_scope";
}

/// The attributes that a variant of the layout has and this version supports; none for a variant
/// that the layout does not have.
inline std::vector<io::AttributeSpec> supported_settings(std::string_view variant) {
  std::vector<io::AttributeSpec> specs;
  if (const io::VariantSpec* spec = io::find_variant(variant)) specs = io::attributes_of(*spec);
  std::erase_if(specs, [](const auto& spec) { return !is_supported_setting(spec.name); });
  return specs;
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
  std::uint64_t counter(const std::string& name, std::uint64_t otherwise) const {
    return has(name) ? m_values.at(name).as_uint64() : otherwise;
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    return has(name) ? m_values.at(name).as_string() : otherwise;
  }

 private:
  std::map<std::string, io::Value> m_values;
};

}  // namespace LinAttn::app
