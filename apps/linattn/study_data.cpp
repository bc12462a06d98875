// SPDX-License-Identifier: BSD-3-Clause
#include "study_data.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <linattn/io/reader.hpp>
#include <linattn/io/writer.hpp>
#include <linattn/version.hpp>

namespace LinAttn::app {
namespace {

constexpr const char* root = "/study";

std::string in_file(const std::string& path) { return path.empty() ? root : root + ("/" + path); }

Json nested(const StudyData::Dataset& data, std::size_t level, std::size_t& at) {
  if (level == data.extents.size()) {
    const double value = data.values[at++];
    return std::isfinite(value) ? Json(value) : Json();
  }
  Json json = Json::array();
  for (std::int64_t i = 0; i < data.extents[level]; ++i) json.push_back(nested(data, level + 1, at));
  return json;
}

Json& place(Json& document, const std::string& path) {
  Json* found = &document;
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t end = std::min(path.find('/', begin), path.size());
    found = &(*found)[path.substr(begin, end - begin)];
    begin = end + 1;
  }
  return *found;
}

}  // namespace

StudyData StudyData::read(const std::string& file) {
  const io::Reader reader(file);
  if (reader.kind(root) != io::ObjectKind::group)
    throw InvalidArgument(file + ": expected a file of linattn study, or none, found one without /study");
  StudyData data;
  std::vector<std::string> groups{""};
  while (!groups.empty()) {
    const std::string group = groups.back();
    groups.pop_back();
    for (const std::string& name : reader.attribute_names(in_file(group)))
      data.m_attributes[group][name] = reader.attribute(in_file(group), name);
    for (const std::string& name : reader.children(in_file(group))) {
      const std::string path = group.empty() ? name : group + "/" + name;
      if (reader.kind(in_file(path)) == io::ObjectKind::group) {
        groups.push_back(path);
        continue;
      }
      const io::Array array = reader.read(in_file(path));
      data.m_datasets[path] = {array.extents(), array.as<double>()};
    }
  }
  if (data.find_attribute("", "options") == nullptr)
    throw InvalidArgument(file + ": expected a file of linattn study, or none, found another study");
  return data;
}

void StudyData::write(const std::string& file) const {
  io::Writer writer(file);
  writer.attribute("/", "producer", "linattn study " LINATTN_VERSION);
  for (const auto& [group, attributes] : m_attributes) {
    writer.group(in_file(group));
    for (const auto& [name, value] : attributes) writer.attribute(in_file(group), name, value);
  }
  for (const auto& [path, data] : m_datasets) writer.write(in_file(path), data.values, data.extents);
  writer.commit();
}

void StudyData::add_to(Json& document) const {
  Json& study = document["study"] = Json::object();
  for (const auto& [group, attributes] : m_attributes)
    for (const auto& [name, value] : attributes) place(study, group)[name] = to_json(value);
  for (const auto& [path, data] : m_datasets) {
    std::size_t at = 0;
    place(study, path) = nested(data, 0, at);
  }
}

StudyData::Dataset& StudyData::dataset(const std::string& path, const std::vector<std::int64_t>& extents) {
  const auto [found, added] = m_datasets.try_emplace(path);
  Dataset& data = found->second;
  if (added || data.extents != extents)
    data = {extents, std::vector<double>(static_cast<std::size_t>(io::element_count(extents)),
                                         std::numeric_limits<double>::quiet_NaN())};
  return data;
}

const StudyData::Dataset* StudyData::find(const std::string& path) const {
  const auto found = m_datasets.find(path);
  return found == m_datasets.end() ? nullptr : &found->second;
}

void StudyData::set(const std::string& path, const std::vector<std::int64_t>& extents, std::vector<double> values) {
  m_datasets[path] = {extents, std::move(values)};
}

void StudyData::attribute(const std::string& group, const std::string& name, const io::Value& value) {
  m_attributes[group][name] = value;
}

const io::Value* StudyData::find_attribute(const std::string& group, const std::string& name) const {
  const auto attributes = m_attributes.find(group);
  if (attributes == m_attributes.end()) return nullptr;
  const auto found = attributes->second.find(name);
  return found == attributes->second.end() ? nullptr : &found->second;
}

}  // namespace LinAttn::app
