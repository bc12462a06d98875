// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cmath>
#include <linattn/io/tensor_file.hpp>
#include <linattn/io/variant_table.hpp>
#include <optional>
#include <set>
#include <span>

#include "hdf5_raii.hpp"

namespace LinAttn::io {
namespace {

std::vector<std::string> split_shape(std::string_view shape) {
  std::vector<std::string> symbols;
  for (std::size_t from = 0; from < shape.size();) {
    const std::size_t to = std::min(shape.find(", ", from), shape.size());
    symbols.emplace_back(shape.substr(from, to - from));
    from = to + 2;
  }
  return symbols;
}

std::string type_expectation(DatasetType type) {
  switch (type) {
    case DatasetType::floating:
      return "float16, float32 or float64";
    case DatasetType::float64:
      return "float64";
    case DatasetType::uint8:
      return "uint8";
    case DatasetType::int64:
      return "int64";
    case DatasetType::number:
      return "int64 or a floating-point type";
  }
  return {};
}

bool type_fits(DatasetType wanted, const DatasetInfo& found) {
  if (!found.element) return false;
  const ElementType element = *found.element;
  switch (wanted) {
    case DatasetType::floating:
      return is_floating(element);
    case DatasetType::float64:
      return element == ElementType::f64;
    case DatasetType::uint8:
      return element == ElementType::u8;
    case DatasetType::int64:
      return element == ElementType::i64 && found.exact;
    case DatasetType::number:
      return true;
  }
  return false;
}

template <class Specs>
auto find_spec(const Specs& specs, std::string_view name) {
  return std::find_if(specs.begin(), specs.end(), [&](const auto& s) { return s.name == name; });
}

template <class Specs>
bool has_spec(const Specs& specs, std::string_view name) {
  return find_spec(specs, name) != specs.end();
}

constexpr const char* root = "/";
constexpr const char* config_group = "/config";
constexpr const char* inputs_group = "/inputs";

}  // namespace

class TensorFileParser {
 public:
  TensorFileParser(const std::filesystem::path& file, const ReadOptions& options)
      : m_options(options), m_reader(file, options.limits) {
    m_result.m_file = file;
    m_result.m_config.m_file = file.string();
  }

  TensorFile parse() {
    read_root();
    read_config();
    read_tensors();
    read_mask_and_offsets();
    fill_defaults();
    check_causal();
    if (m_variant != nullptr) read_variant_inputs();
    read_states_and_results();
    return std::move(m_result);
  }

 private:
  struct Binding {
    std::int64_t extent;
    std::string source;
  };

  [[noreturn]] void fail(const std::string& where, const std::string& text) const {
    throw InvalidArgument(
        hdf5::one_line(detail::message(m_result.m_file.string(), ": ", where, ": ", text)));
  }

  static std::string attribute_path(const std::string& object, std::string_view name) {
    return detail::message("attribute '", name, "' of ", object);
  }

  bool group_present(const std::string& path) const {
    switch (m_reader.kind(path)) {
      case ObjectKind::absent:
        return false;
      case ObjectKind::group:
        return true;
      case ObjectKind::dataset:
        fail(path, "expected a group, found a dataset");
      default:
        fail(path, "expected a group, found an object of another kind");
    }
  }

  // ---- root ----

  std::optional<std::string> root_string(const char* name) const {
    const auto names = m_reader.attribute_names(root);
    if (!std::binary_search(names.begin(), names.end(), std::string(name))) return {};
    const Value value = m_reader.attribute(root, name);
    if (!value.is_string())
      fail(attribute_path(root, name), "expected a string, found " + value.to_string());
    return value.as_string();
  }

  void read_root() {
    const auto schema = root_string("schema");
    const std::string expected = detail::message("expected '", schema_name, "', found ");
    if (!schema) fail(attribute_path(root, "schema"), expected + "nothing");
    if (*schema != schema_name)
      fail(attribute_path(root, "schema"), expected + "'" + *schema + "'");

    for (const std::string& name : m_reader.attribute_names(root)) {
      try {
        m_result.m_attributes.emplace(name, m_reader.attribute(root, name));
      } catch (const InvalidArgument&) {
        m_result.m_ignored.push_back(attribute_path(root, name));  // not a single value
      }
    }
    m_result.m_producer = root_string("producer").value_or("");

    const auto named = root_string("variant");
    if (named) {
      m_file_variant = find_variant(*named);
      if (m_file_variant == nullptr)
        fail(attribute_path(root, "variant"),
             detail::message("expected one of ", variant_names(), ", found '", *named, "'"));
      m_result.m_file_variant = *named;
    }
    for (const char* group : {"/expected", "/expected_grad"})
      if (!named && group_present(group))
        fail(attribute_path(root, "variant"),
             detail::message("expected one of ", variant_names(), " because ", group,
                             " is present, found nothing"));
    m_variant = m_options.variant.empty() ? m_file_variant : &variant_spec(m_options.variant);
    if (m_variant != nullptr) m_result.m_variant = m_variant->name;
  }

  // ---- /config ----

  std::vector<AttributeSpec> known_attributes(const VariantSpec* variant) const {
    if (variant != nullptr) return attributes_of(*variant);
    std::vector<AttributeSpec> all;
    for (const VariantSpec& any : variant_table())
      for (const AttributeSpec& spec : attributes_of(any))
        if (!has_spec(all, spec.name)) all.push_back(spec);
    return all;
  }

  AttributeSpec known_attribute(const std::string& name) const {
    if (m_variant != nullptr) return attribute_of(*m_variant, name);
    const auto attributes = known_attributes(nullptr);
    const auto spec = find_spec(attributes, name);
    if (spec == attributes.end())
      throw InvalidArgument("expected one of " + list_names(attributes) +
                            ", found an unknown option");
    return *spec;
  }

  std::vector<DatasetSpec> known_config_datasets(const VariantSpec* variant) const {
    std::vector<DatasetSpec> all;
    for (const VariantSpec& any : variant_table())
      if (variant == nullptr || &any == variant)
        for (const DatasetSpec& spec : any.config)
          if (!has_spec(all, spec.name)) all.push_back(spec);
    return all;
  }

  template <class Specs>
  static std::string list_names(const Specs& specs) {
    std::string text;
    for (const auto& spec : specs) {
      if (!text.empty()) text += ", ";
      text += spec.name;
    }
    return text.empty() ? "none" : text;
  }

  static bool is_common(std::string_view name) {
    return name == "causal" || name == "normalise" || name == "scale";
  }

  /// Whether the name means the same to both variants.
  static bool is_shared(std::string_view name, const VariantSpec* one, const VariantSpec* other) {
    const auto redefines = [&](const VariantSpec* variant) {
      return variant != nullptr && has_spec(variant->attributes, name);
    };
    return is_common(name) && !redefines(one) && !redefines(other);
  }

  std::string for_variant(const VariantSpec* variant) const {
    return variant == nullptr ? std::string() : detail::message(" for variant ", variant->name);
  }

  void read_config() {
    // The file is judged by its own variant; what another variant can use of it is little.
    const VariantSpec* owner = m_file_variant != nullptr ? m_file_variant : m_variant;
    const bool same = owner == m_variant;
    auto& values = m_result.m_config.m_values;

    if (group_present(config_group)) {
      const auto attributes = known_attributes(owner);
      for (const std::string& name : m_reader.attribute_names(config_group)) {
        const auto spec = find_spec(attributes, name);
        if (spec == attributes.end())
          fail(attribute_path(config_group, name),
               detail::message("expected one of ", list_names(attributes), for_variant(owner),
                               ", found an unknown attribute"));
        Value value = m_reader.attribute(config_group, name);
        // Without a variant a name may mean different things; only what all share can be checked.
        if (owner != nullptr || is_common(name))
          value = checked(*spec, value, attribute_path(config_group, name));
        if (same || is_shared(name, owner, m_variant))
          values[name] = value;
        else
          m_result.m_ignored.push_back(attribute_path(config_group, name));
      }
      read_config_datasets(owner, same);
    }
    override_config();
  }

  Value checked(const AttributeSpec& spec, const Value& value, const std::string& where) const {
    try {
      return coerce(spec, value);
    } catch (const InvalidArgument& error) {
      fail(where, error.what());
    }
  }

  void read_config_datasets(const VariantSpec* owner, bool same) {
    const auto datasets = known_config_datasets(owner);
    for (const std::string& name : m_reader.children(config_group)) {
      const std::string path = detail::message(config_group, "/", name);
      if (m_reader.kind(path) != ObjectKind::dataset) {
        m_result.m_ignored.push_back(path);
        continue;
      }
      if (!has_spec(datasets, name))
        fail(path, detail::message("expected one of ", list_names(datasets), for_variant(owner),
                                   ", found an unknown dataset"));
      if (m_result.m_config.m_values.contains(name))
        fail(path, "expected either an attribute or a dataset of this name, found both");
      if (same && owner != nullptr)
        m_config_datasets.insert(name);
      else
        m_result.m_ignored.push_back(path);
    }
    const auto given = [&](const char* name) {
      return m_result.m_config.m_values.contains(name) || m_config_datasets.contains(name);
    };
    if (given("moments") && (given("alpha") || given("beta")))
      fail(config_group, "expected either moments or alpha and beta, found both");
  }

  void override_config() {
    auto& values = m_result.m_config.m_values;
    const auto drop = [&](const std::string& name) {
      values.erase(name);
      m_config_datasets.erase(name);
    };
    const auto& given = m_options.config;
    if (given.contains("moments"))
      for (const char* name : {"alpha", "beta"}) drop(name);
    else if (has_moments() && (given.contains("alpha") || given.contains("beta")))
      for (const char* name : {"moments", "moments_scope"}) drop(name);

    for (const auto& [name, value] : given) {
      drop(name);
      try {
        values[name] = coerce(known_attribute(name), value);
      } catch (const InvalidArgument& error) {
        throw InvalidArgument(detail::message("option '", name, "': ", error.what()));
      }
    }
    if (given.contains("moments") && (given.contains("alpha") || given.contains("beta")))
      throw InvalidArgument(
          "option 'moments': expected either moments or alpha and beta, found both");
  }

  bool has_moments() const { return m_result.m_config.m_values.contains("moments"); }

  void fill_defaults() {
    Config& config = m_result.m_config;
    if (m_variant == nullptr) {
      if (!config.has("causal")) config.m_values["causal"] = 0;
      return;
    }
    for (const DatasetSpec& spec : m_variant->config)
      if (m_config_datasets.contains(std::string(spec.name)))
        config.m_arrays.emplace(spec.name, load(config_group, spec));

    m_features_given = config.has("features");
    for (const AttributeSpec& spec : attributes_of(*m_variant)) {
      const std::string name(spec.name);
      if (config.has(name)) continue;
      if (auto value = default_of(spec, config.m_values, m_result.m_problem.d))
        config.m_values[name] = *std::move(value);
    }
  }

  // ---- datasets ----

  /// Checks extents against the symbols, binding those met for the first time.
  void check_extents(const std::string& path, std::string_view shape,
                     const std::vector<std::int64_t>& extents) {
    const auto symbols = split_shape(shape);
    if (symbols.size() != extents.size())
      fail(path, detail::message("expected rank ", symbols.size(), " (", shape, "), found rank ",
                                 extents.size(), " with extents ", to_string(extents)));
    for (std::size_t r = 0; r < symbols.size(); ++r) {
      const auto [bound, is_new] = m_extents.try_emplace(symbols[r], Binding{extents[r], path});
      if (!is_new && bound->second.extent != extents[r])
        fail(path, detail::message("expected extents (", shape, ") with ", symbols[r], " = ",
                                   bound->second.extent, " as in ", bound->second.source,
                                   ", found extents ", to_string(extents)));
    }
  }

  void bind(const std::string& symbol, std::int64_t extent, const std::string& source) {
    m_extents.insert_or_assign(symbol, Binding{extent, source});
  }

  DatasetInfo describe(const std::string& path, DatasetType type) const {
    const DatasetInfo info = m_reader.describe(path);
    if (!type_fits(type, info))
      fail(path, detail::message("expected ", type_expectation(type), ", found ", info.type));
    return info;
  }

  Array load(const std::string& group, const DatasetSpec& spec) {
    const std::string path = detail::message(group, "/", spec.name);
    check_extents(path, spec.shape, describe(path, spec.type).extents);
    return m_reader.read(path);
  }

  bool present(const std::string& group, std::string_view name) const {
    return m_reader.kind(detail::message(group, "/", name)) != ObjectKind::absent;
  }

  const Array* load_if_present(const std::string& group, const DatasetSpec& spec) {
    if (!present(group, spec.name)) return nullptr;
    const std::string path = detail::message(group, "/", spec.name);
    return &(m_result.m_arrays[path] = load(group, spec));
  }

  const Array& load_required(const std::string& group, const DatasetSpec& spec) {
    if (const Array* array = load_if_present(group, spec)) return *array;
    fail(detail::message(group, "/", spec.name),
         detail::message("expected a dataset with extents (", spec.shape, "), found nothing"));
  }

  /// Notes the members of a group that were not read.
  void note_ignored(const std::string& group) {
    for (const std::string& name : m_reader.children(group)) {
      const std::string path = group == root ? "/" + name : detail::message(group, "/", name);
      const bool read = m_result.m_arrays.contains(path) || m_groups_read.contains(path);
      if (!read) m_result.m_ignored.push_back(path);
    }
  }

  bool enter_group(const std::string& path) {
    if (!group_present(path)) return false;
    m_groups_read.insert(path);
    return true;
  }

  // ---- /inputs ----

  void read_tensors() {
    if (!enter_group(inputs_group))
      fail(inputs_group, "expected a group with q, k and v, found nothing");
    const Config& config = m_result.m_config;
    const bool is_lavo = m_variant != nullptr && m_variant->name == "lavo";
    m_result.m_tied = is_lavo && config.has("tied") && config.flag("tied");

    Problem& problem = m_result.m_problem;
    const Array& q = load_required(inputs_group, {"q", "B, H, Nq, D"});
    const Array& k = load_required(inputs_group, {"k", "B, Hkv, Nk, D"});
    problem.batch = q.extent(0);
    problem.heads = q.extent(1);
    problem.nq = q.extent(2);
    problem.d = q.extent(3);
    problem.kv_heads = k.extent(1);
    problem.nk = k.extent(2);
    if (is_lavo) bind("Dv", problem.d, "/inputs/q (lavo needs Dv = D)");
    if (!m_result.m_tied)
      problem.dv = load_required(inputs_group, {"v", "B, Hkv, Nk, Dv"}).extent(3);
    else if (present(inputs_group, "v"))
      fail("/inputs/v", "expected nothing because tied = 1 makes v equal k, found a dataset");
    else
      problem.dv = problem.d;

    const bool divides =
        problem.kv_heads == 0 ? problem.heads == 0 : problem.heads % problem.kv_heads == 0;
    if (!divides)
      fail("/inputs/q", detail::message("expected H to be a multiple of Hkv = ", problem.kv_heads,
                                        " as in /inputs/k, found H = ", problem.heads));
    bind("R", problem.d, "/inputs/q (R = D)");
  }

  void read_mask_and_offsets() {
    const Problem& problem = m_result.m_problem;
    const bool offsets_q = present(inputs_group, "cu_seqlens_q");
    const bool offsets_k = present(inputs_group, "cu_seqlens_k");
    const bool mask = present(inputs_group, "key_mask");
    if (offsets_q != offsets_k)
      fail(detail::message("/inputs/cu_seqlens_", offsets_q ? "k" : "q"),
           detail::message("expected a dataset because cu_seqlens_", offsets_q ? "q" : "k",
                           " is given, found nothing"));
    if (mask && offsets_q)
      fail("/inputs/key_mask",
           "expected nothing because cu_seqlens_q and cu_seqlens_k are given, found a dataset");

    if (mask) {
      const Array& visible = load_required(inputs_group, {"key_mask", "B, Nk", DatasetType::uint8});
      const auto values = visible.values<std::uint8_t>();
      const auto wrong = std::find_if(values.begin(), values.end(), [](auto x) { return x > 1; });
      if (wrong != values.end()) {
        const std::int64_t at = wrong - values.begin();
        fail("/inputs/key_mask", detail::message("expected 0 or 1, found ", int(*wrong), " at (",
                                                 at / problem.nk, ", ", at % problem.nk, ")"));
      }
    }

    m_result.m_packed = offsets_q;
    m_result.m_members = problem.batch;
    if (offsets_q) {
      if (problem.batch != 1)
        fail("/inputs/cu_seqlens_q",
             detail::message("expected B = 1 for packed sequences, found B = ", problem.batch,
                             " in /inputs/q"));
      read_offsets("cu_seqlens_q", problem.nq, "Nq");
      read_offsets("cu_seqlens_k", problem.nk, "Nk");
      Problem& packed = m_result.m_problem;
      packed.members = static_cast<std::int64_t>(offsets("cu_seqlens_q").size()) - 1;
      for (const Member& member : sequences()) {
        packed.longest_q = std::max(packed.longest_q, member.nq);
        packed.longest_k = std::max(packed.longest_k, member.nk);
      }
      m_result.m_members = packed.members;
    }
    bind("M", m_result.m_members, offsets_q ? "/inputs/cu_seqlens_q" : "/inputs/q (members = B)");
  }

  std::span<const std::int64_t> offsets(const char* name) const {
    return m_result.at(detail::message(inputs_group, "/", name)).values<std::int64_t>();
  }

  void read_offsets(const char* name, std::int64_t last, const char* last_name) {
    const std::string path = detail::message(inputs_group, "/", name);
    load_required(inputs_group, {name, "S+1", DatasetType::int64});
    const auto values = offsets(name);
    if (values.empty()) fail(path, "expected at least one offset, found extents (0)");
    if (values.front() != 0)
      fail(path, detail::message("expected the first offset to be 0, found ", values.front()));
    for (std::size_t i = 1; i < values.size(); ++i)
      if (values[i] < values[i - 1])
        fail(path, detail::message("expected non-decreasing offsets, found ", values[i - 1],
                                   " followed by ", values[i], " at (", i, ")"));
    if (values.back() != last)
      fail(path, detail::message("expected the last offset to be ", last_name, " = ", last,
                                 ", found ", values.back()));
  }

  struct Member {
    std::string name;
    std::int64_t nq, nk;
  };

  /// Sequences that attend on their own. Without offsets all are alike, so one stands for them.
  std::vector<Member> sequences() const {
    const Problem& problem = m_result.m_problem;
    if (!m_result.m_packed) return {{"", problem.nq, problem.nk}};
    std::vector<Member> result;
    const auto q = offsets("cu_seqlens_q"), k = offsets("cu_seqlens_k");
    for (std::size_t s = 0; s + 1 < q.size(); ++s)
      result.push_back(
          {detail::message(" in packed sequence ", s), q[s + 1] - q[s], k[s + 1] - k[s]});
    return result;
  }

  void check_causal() const {
    if (!m_result.causal()) return;
    for (const Member& member : sequences())
      if (member.nq > member.nk)
        fail(m_result.m_packed ? "/inputs/cu_seqlens_q" : "/inputs/q",
             detail::message("expected Nq <= Nk because causal = 1, found Nq = ", member.nq,
                             " and Nk = ", member.nk, member.name));
  }

  // ---- what single variants add ----

  void read_variant_inputs() {
    if (m_variant->name == "lavo") bind_lavo();
    if (m_variant->name == "lln-diag") check_lln_diag();
    if (m_variant->name == "performer" && m_features_given)
      bind("features", m_result.m_config.integer("features"), "the setting features");
    for (const DatasetSpec& spec : m_variant->inputs) {
      if (spec.required)
        load_required(inputs_group, spec);
      else
        load_if_present(inputs_group, spec);
    }
    if (m_variant->name == "lavo") check_lavo();
    if (m_variant->name == "performer") count_features();
    if (m_variant->name == "taylor") {
      const std::int64_t d = m_result.m_problem.d;
      bind("R", 1 + d + d * (d + 1) / 2, "/inputs/q (R = 1 + D + D (D + 1) / 2)");
    }
  }

  /// As many as the projection has rows, if there is one.
  void count_features() {
    Value& features = m_result.m_config.m_values["features"];
    if (const Array* projection = m_result.find("/inputs/projection")) {
      if (projection->extent(0) < 1)
        fail("/inputs/projection", "expected at least one row, found none");
      features = projection->extent(0);
    }
    bind("R", features.as_int64(), "the setting features, or /inputs/projection");
  }

  void check_lln_diag() {
    bind("block", m_result.m_config.integer("block"), "the setting block");
    if (m_result.causal()) return;
    for (const Member& member : sequences())
      if (member.nq != member.nk)
        fail("/inputs/q",
             detail::message("expected Nq = Nk because lln-diag with causal = 0 needs it, "
                             "found Nq = ",
                             member.nq, " and Nk = ", member.nk, member.name));
  }

  void bind_lavo() {
    const Config& config = m_result.m_config;
    const std::int64_t window = config.integer("window");
    bind("window", window, "the setting window");
    const std::string& kind = config.text("window_kind");
    const bool causal = m_result.causal();
    const std::int64_t slots = kind == "slide"   ? window
                               : kind == "block" ? (causal ? window : 2 * window - 1)
                                                 : (causal ? 2 * window : 3 * window - 1);
    bind("nb", slots, "window and window_kind");
  }

  void check_lavo() {
    const Config& config = m_result.m_config;
    if (config.text("bias") == "table" && !m_result.has("/inputs/bias"))
      fail("/inputs/bias",
           "expected a dataset with extents (H, nb) because bias = 'table', found nothing");
    const Array* bases = m_result.find("/inputs/bases");
    if (bases == nullptr) return;
    const std::int64_t rank = bases->extent(1), d = bases->extent(2);
    if (rank > d)
      fail("/inputs/bases", detail::message("expected at most D = ", d, " rows, found ", rank));
    if (config.flag("check_bases")) check_orthonormal(*bases);
  }

  void check_orthonormal(const Array& bases) const {
    constexpr double tolerance = 1e-3;
    const std::vector<double> rows = bases.as<double>();
    const std::int64_t rank = bases.extent(1), d = bases.extent(2);
    for (std::int64_t head = 0; head < bases.extent(0); ++head)
      for (std::int64_t i = 0; i < rank; ++i)
        for (std::int64_t j = 0; j <= i; ++j) {
          double product = 0.0;
          for (std::int64_t c = 0; c < d; ++c)
            product += rows[(head * rank + i) * d + c] * rows[(head * rank + j) * d + c];
          const double expected = i == j ? 1.0 : 0.0;
          if (!(std::abs(product - expected) <= tolerance))
            fail("/inputs/bases",
                 detail::message(
                     "expected orthonormal rows (check_bases = 0 allows others), found ", product,
                     " as the product of rows ", i, " and ", j, " of head ", head));
        }
  }

  // ---- states, expectations, cotangents ----

  void read_states_and_results() {
    const bool own =
        m_variant != nullptr && (m_variant == m_file_variant || m_file_variant == nullptr);
    if (own) read_state("/inputs/state", true);
    note_ignored(inputs_group);

    const DatasetSpec output{"o", "B, H, Nq, Dv"};
    if (enter_group("/cotangent")) {
      load_if_present("/cotangent", output);
      if (own) read_state("/cotangent/state", false);
      note_ignored("/cotangent");
    }
    if (own && enter_group("/expected")) {
      load_if_present("/expected", output);
      m_result.m_expected_tolerances = read_tolerances("/expected");
      read_state("/expected/state", false);
      if (enter_group("/expected/moments")) read_moments();
      if (enter_group("/expected/diagnostics")) {
        for (const char* name : {"entropy", "entropy_biased", "entropy_unbiased", "spectral_gap",
                                 "variance", "logvar", "logvar_within"})
          load_if_present("/expected/diagnostics", {name, "B, H"});
        note_ignored("/expected/diagnostics");
      }
      note_ignored("/expected");
    }
    if (own && enter_group("/expected_grad")) {
      read_gradients();
      m_result.m_gradient_tolerances = read_tolerances("/expected_grad");
      read_state("/expected_grad/state", false);
      note_ignored("/expected_grad");
    }
    m_groups_read.insert(config_group);
    note_ignored(root);
  }

  void read_state(const std::string& group, bool whole) {
    if (!enter_group(group)) return;
    for (const DatasetSpec& spec : m_variant->state) {
      if (whole && spec.required && !is_idle(spec.name))
        load_required(group, spec);
      else
        load_if_present(group, spec);
    }
    note_ignored(group);
  }

  /// Whether the settings make this part of a state meaningless.
  bool is_idle(std::string_view name) const {
    return (name == "z" && !m_result.m_config.flag("normalise")) ||
           (m_result.m_tied && (name == "ring_v" || name == "mV"));
  }

  void read_gradients() {
    const std::string group = "/expected_grad";
    load_if_present(group, {"q", "B, H, Nq, D"});
    load_if_present(group, {"k", "B, Hkv, Nk, D"});
    if (!m_result.m_tied) load_if_present(group, {"v", "B, Hkv, Nk, Dv"});
    for (const DatasetSpec& spec : m_variant->inputs)
      if (spec.differentiable) load_if_present(group, spec);
    for (const AttributeSpec& spec : attributes_of(*m_variant)) {
      if (!spec.differentiable) continue;
      const auto per_head = find_spec(m_variant->config, spec.name);
      const std::string_view shape = per_head == m_variant->config.end() ? "" : per_head->shape;
      // The gradient of a setting given once is one number or, before its sum, one for each head.
      const bool is_array = m_result.m_config.arrays().contains(std::string(spec.name));
      load_scalar_or(
          group, spec.name,
          shape.empty() ? std::vector<std::string>{} : std::vector<std::string>{std::string(shape)},
          !is_array);
    }
  }

  void read_moments() {
    const std::string group = "/expected/moments";
    for (const char* name : {"sigma_q", "sigma_k", "alpha", "beta"})
      load_scalar_or(group, name, {"H", "Hkv"}, true);
    note_ignored(group);
  }

  /// A number, as a dataset of one element or as an attribute of the group, or a vector whose
  /// extent is one of the symbols.
  void load_scalar_or(const std::string& group, std::string_view name,
                      const std::vector<std::string>& symbols, bool scalar_fits) {
    const std::string path = detail::message(group, "/", name);
    const auto attributes = m_reader.attribute_names(group);
    const bool is_attribute =
        std::binary_search(attributes.begin(), attributes.end(), std::string(name));
    if (present(group, name)) {
      if (is_attribute)
        fail(path, "expected either an attribute or a dataset of this name, found both");
      const auto extents = describe(path, DatasetType::floating).extents;
      bool fits = scalar_fits && (extents.empty() || (extents.size() == 1 && extents[0] == 1));
      std::string expected = scalar_fits ? "one number" : "";
      for (const std::string& symbol : symbols) {
        const std::int64_t extent = m_extents.at(symbol).extent;
        fits = fits || (extents.size() == 1 && extents[0] == extent);
        expected += detail::message(expected.empty() ? "" : " or ", "extents (", symbol, ") = (",
                                    extent, ")");
      }
      if (!fits)
        fail(path, detail::message("expected ", expected, ", found extents ", to_string(extents)));
      m_result.m_arrays[path] = m_reader.read(path);
    } else if (is_attribute) {
      const Value value = m_reader.attribute(group, std::string(name));
      if (value.is_string())
        fail(attribute_path(group, name), "expected a number, found " + value.to_string());
      if (!scalar_fits)
        fail(attribute_path(group, name),
             "expected a dataset with one number for each head, found one number");
      m_result.m_arrays[path] = Array(std::vector<double>{value.as_double()}, {});
    }
  }

  Tolerances read_tolerances(const std::string& group) {
    Tolerances result;
    for (const std::string& name : m_reader.attribute_names(group)) {
      double* target = name == "rtol_f64"    ? &result.f64
                       : name == "rtol_f32"  ? &result.f32
                       : name == "rtol_f16"  ? &result.f16
                       : name == "rtol_bf16" ? &result.bf16
                                             : nullptr;
      if (target == nullptr) {
        if (!m_result.m_arrays.contains(detail::message(group, "/", name)))
          m_result.m_ignored.push_back(attribute_path(group, name));
        continue;
      }
      const Value value = m_reader.attribute(group, name);
      if (value.is_string() || !(value.as_double() >= 0.0) || std::isinf(value.as_double()))
        fail(attribute_path(group, name),
             "expected a finite number >= 0, found " + value.to_string());
      *target = value.as_double();
    }
    return result;
  }

  ReadOptions m_options;
  Reader m_reader;
  TensorFile m_result;
  const VariantSpec* m_variant = nullptr;
  const VariantSpec* m_file_variant = nullptr;
  std::set<std::string> m_config_datasets;
  bool m_features_given = false;
  std::set<std::string> m_groups_read;
  std::map<std::string, Binding> m_extents;
};

TensorFile TensorFile::read(const std::filesystem::path& file, const ReadOptions& options) {
  return TensorFileParser(file, options).parse();
}

const Array* TensorFile::find(const std::string& path) const {
  const auto found = m_arrays.find(path);
  return found == m_arrays.end() ? nullptr : &found->second;
}

const Array& TensorFile::at(const std::string& path) const {
  if (const Array* array = find(path)) return *array;
  throw InvalidArgument(hdf5::one_line(
      detail::message(m_file.string(), ": ", path, ": expected a dataset, found nothing")));
}

std::vector<std::string> TensorFile::names(const std::string& group) const {
  const std::string prefix = group + "/";
  std::vector<std::string> result;
  for (auto entry = m_arrays.lower_bound(prefix);
       entry != m_arrays.end() && entry->first.starts_with(prefix); ++entry) {
    std::string name = entry->first.substr(prefix.size());
    if (name.find('/') == std::string::npos) result.push_back(std::move(name));
  }
  return result;
}

bool Config::has(const std::string& name) const {
  return m_values.contains(name) || m_arrays.contains(name);
}

const Value& Config::at(const std::string& name) const {
  const auto found = m_values.find(name);
  if (found != m_values.end()) return found->second;
  const bool is_array = m_arrays.contains(name);
  throw InvalidArgument(
      hdf5::one_line(detail::message(m_file, ": ", config_group, ": expected one value for '", name,
                                     "', found ", is_array ? "one for each head" : "nothing")));
}

bool Config::flag(const std::string& name) const { return at(name).as_int64() != 0; }
std::int64_t Config::integer(const std::string& name) const { return at(name).as_int64(); }
std::uint64_t Config::counter(const std::string& name) const { return at(name).as_uint64(); }
double Config::real(const std::string& name) const { return at(name).as_double(); }
const std::string& Config::text(const std::string& name) const { return at(name).as_string(); }

std::vector<double> Config::per_head(const std::string& name, std::int64_t count) const {
  const auto found = m_arrays.find(name);
  if (found == m_arrays.end())
    return std::vector<double>(static_cast<std::size_t>(count), real(name));
  if (found->second.size() != count)
    throw InvalidArgument(
        hdf5::one_line(detail::message(m_file, ": ", config_group, "/", name, ": expected ", count,
                                       " values, found ", found->second.size())));
  return found->second.as<double>();
}

}  // namespace LinAttn::io
