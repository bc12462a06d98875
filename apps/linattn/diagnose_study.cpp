// SPDX-License-Identifier: BSD-3-Clause
#include "diagnose_study.hpp"

#include <cmath>
#include <iostream>
#include <linattn/io/tensor_file.hpp>
#include <linattn/io/writer.hpp>
#include <linattn/version.hpp>
#include <memory>
#include <numbers>
#include <optional>
#include <vector>

#include "execution.hpp"
#include "instruments.hpp"
#include "progress.hpp"
#include "random.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

using Numbers = std::vector<double>;

const Numbers sigmas{0.3, 0.45, 0.6, 0.8, 1.0, 1.2, 1.4, 1.8, 2.2, 2.6};  // sigma_sm = sigma_q sigma_k

/// A kernel of the study, LLN by a rule.
struct Curve {
  std::string name, kernel;
  std::optional<MomentRule> rule;
};
const std::vector<Curve>& curves() {
  static const std::vector<Curve> list{{"softmax", "softmax", {}},
                                       {"lln_authors", "lln", MomentRule::authors},
                                       {"lln_table", "lln", MomentRule::table},
                                       {"lln_entropy", "lln", MomentRule::entropy},
                                       {"quadratic", "quadratic", {}},
                                       {"relu", "relu", {}},
                                       {"elu", "elu", {}}};
  return list;
}

/// Draws are heads: q and k of equal deviation, the matrix of each of its own.
DiagnosedTensors gaussian(std::uint64_t seed, std::uint64_t stream, std::int64_t draws, std::int64_t n, std::int64_t d,
                          double sigma_sm) {
  DiagnosedTensors t{{1, draws, draws, n, n, d, d}, {}, {}, {}};
  const double sigma = std::sqrt(sigma_sm);
  const CounterRandom of_q(seed, 2 * stream), of_k(seed, 2 * stream + 1);
  for (std::int64_t i = 0; i < draws * n * d; ++i) {
    t.q.push_back(sigma * of_q.normal(static_cast<std::uint64_t>(i)));
    t.k.push_back(sigma * of_k.normal(static_cast<std::uint64_t>(i)));
  }
  return t;
}

/// Centred normal numbers in the place of q and k, with the deviations of each key/value head.
DiagnosedTensors gaussian_like(std::uint64_t seed, std::uint64_t stream, DiagnosedTensors t,
                               const HostDeviations& moments) {
  const auto draw = [&](Numbers& x, std::uint64_t which, std::int64_t heads, std::int64_t group, std::int64_t n,
                        const Numbers& sigma) {
    const CounterRandom normals(seed, 2 * stream + which);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::int64_t head = static_cast<std::int64_t>(i) / (n * t.p.d) % heads;
      x[i] = sigma[static_cast<std::size_t>(head / group)] * normals.normal(i);
    }
  };
  draw(t.q, 0, t.p.heads, t.p.group(), t.p.nq, moments.sigma_q);
  draw(t.k, 1, t.p.kv_heads, 1, t.p.nk, moments.sigma_k);
  return t;
}

Diagnostics measure(const Curve& curve, const DiagnosedTensors& t, bool per_head) {
  const LlnRates rates = curve.rule ? matched_rates(t, *curve.rule, per_head) : LlnRates{};
  return run_instruments(curve.kernel, rates, t, {});
}

/// What log-normal theory says of softmax attention of this log-variance and n keys.
struct LogNormal {
  double entropy, relative_variance, spectral_gap;
  LogNormal(double variance, double n)
      : entropy(std::log2(n) - variance / (2 * std::numbers::ln2)),
        relative_variance(std::expm1(variance)),
        spectral_gap(1 - std::sqrt(std::expm1(variance) / n)) {}
};

class Study {
 public:
  Study(const DiagnoseStudyOptions& options, io::Writer& writer, Json& document)
      : m_options(options),
        m_writer(writer),
        m_document(document),
        m_n(options.quick ? 96 : 512),
        m_d(options.quick ? 32 : 64),
        m_draws(options.quick ? 2 : 6) {}

  void run(const Progress& progress) {
    m_writer.attribute("/study", "tokens", m_n);
    m_writer.attribute("/study", "head_dimension", m_d);
    m_writer.attribute("/study", "draws", m_draws);
    m_writer.attribute("/study", "seed", m_options.seed);
    m_document["study"] = {{"tokens", m_n}, {"head_dimension", m_d}, {"draws", m_draws}, {"seed", m_options.seed}};
    Numbers temperatures;
    for (const double sigma : sigmas) temperatures.push_back(1 / sigma);
    write("sigma_sm", sigmas, {points()});
    write("temperature", temperatures, {points()});

    std::vector<std::vector<Diagnostics>> found(curves().size());
    for (std::size_t s = 0; s < sigmas.size(); ++s) {
      const DiagnosedTensors t = gaussian(m_options.seed, s, m_draws, m_n, m_d, sigmas[s]);
      for (std::size_t c = 0; c < curves().size(); ++c) {
        progress.show(detail::message("sigma_sm ", sigmas[s], ", ", curves()[c].name));
        found[c].push_back(measure(curves()[c], t, true));
      }
    }
    for (std::size_t c = 0; c < curves().size(); ++c) write_curve(curves()[c], found[c]);
    Numbers entropy, variance, gap;
    for (const double sigma : sigmas) {
      const LogNormal theory(sigma * sigma, static_cast<double>(m_n));
      entropy.push_back(theory.entropy);
      variance.push_back(theory.relative_variance);
      gap.push_back(theory.spectral_gap);
    }
    write("lognormal/entropy", entropy, {points()});
    write("lognormal/relative_variance", variance, {points()});
    write("lognormal/spectral_gap", gap, {points()});
  }

  /// Per head of a file, and of Gaussian q and k of the same extents and deviations. LLN is matched to each head and,
  /// as NAME_tensor, to the whole tensor.
  void run_real(const DiagnosedTensors& t, const std::string& name, const Progress& progress) {
    m_writer.attribute("/study/real", "file", name);
    m_document["study"]["real_file"] = name;
    m_document["study"]["real_extents"] = to_json(t.p);
    const HostDeviations moments =
        measured_deviations(t, {.scope = MomentScope::head, .cross = CrossTerm::all_pairs});
    write("real/sigma_q", moments.sigma_q, {t.p.kv_heads});
    write("real/sigma_k", moments.sigma_k, {t.p.kv_heads});
    write("real/cross", moments.cross, {t.p.kv_heads});
    measure_heads("real", t, progress);
    measure_heads("real_gaussian", gaussian_like(m_options.seed, 1000, t, moments), progress);
  }

 private:
  void measure_heads(const std::string& group, const DiagnosedTensors& t, const Progress& progress) {
    for (const Curve& curve : curves())
      for (const bool per_head : {true, false}) {
        if (!curve.rule && !per_head) continue;
        const std::string name = group + "/" + curve.name + (per_head ? "" : "_tensor");
        progress.show(name);
        const Diagnostics d = measure(curve, t, per_head);
        for (const NamedInstrument& i : instruments()) {
          Numbers values;
          for (const HeadDiagnostics& head : d.values) values.push_back(head.*i.value);
          write(name + "/" + i.name, values, {t.p.batch, t.p.heads});
        }
      }
  }

  std::int64_t points() const { return static_cast<std::int64_t>(sigmas.size()); }

  void write(const std::string& name, const Numbers& values, const std::vector<std::int64_t>& extents) {
    m_writer.write("/study/" + name, values, extents);
    Json* place = &m_document["study"];
    std::size_t begin = 0;
    for (std::size_t end; (end = name.find('/', begin)) != std::string::npos; begin = end + 1)
      place = &(*place)[name.substr(begin, end - begin)];
    Json list = Json::array();
    const std::size_t rows = extents.size() == 2 ? static_cast<std::size_t>(extents[0]) : 1;
    for (std::size_t r = 0; r < rows; ++r) {
      Json row = Json::array();
      for (std::size_t at = r * values.size() / rows; at < (r + 1) * values.size() / rows; ++at)
        row.push_back(std::isfinite(values[at]) ? Json(values[at]) : Json());
      if (extents.size() == 2)
        list.push_back(row);
      else
        list = row;
    }
    (*place)[name.substr(begin)] = list;
  }

  /// (temperature, draw) of every instrument.
  void write_curve(const Curve& curve, const std::vector<Diagnostics>& found) {
    for (const NamedInstrument& i : instruments()) {
      Numbers values;
      for (const Diagnostics& d : found)
        for (const HeadDiagnostics& head : d.values) values.push_back(head.*i.value);
      write(curve.name + "/" + i.name, values, {points(), m_draws});
    }
  }

  const DiagnoseStudyOptions& m_options;
  io::Writer& m_writer;
  Json& m_document;
  std::int64_t m_n, m_d, m_draws;
};

}  // namespace

ExitStatus write_diagnose_study(const DiagnoseStudyOptions& options) {
  std::vector<std::string> others{options.output};
  if (!options.real.empty()) others.push_back(options.real);
  const JsonOutput json(options.json, others);
  std::optional<DiagnosedTensors> real;
  if (!options.real.empty()) {
    const io::TensorFile file = io::TensorFile::read(options.real);
    require_not_packed(file);
    real = read_tensors(file);
  }
  io::Writer writer(options.output);
  const Runtime runtime;
  const Progress progress;
  writer.attribute("/", "producer", "linattn diagnose " LINATTN_VERSION);
  Json document = json_document("diagnose");
  Study study(options, writer, document);
  study.run(progress);
  if (real) study.run_real(*real, options.real, progress);
  progress.show("");
  writer.commit();
  if (!json.is_stdout())
    std::cout << options.output << ": " << curves().size() << " kernels at " << sigmas.size() << " temperatures"
              << (real ? ", and of " + options.real : std::string()) << '\n';
  json.write(document);
  return ExitStatus::done;
}

}  // namespace LinAttn::app
