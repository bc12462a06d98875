// SPDX-License-Identifier: BSD-3-Clause

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

/// A layer: the files that belong to it and the layers whose headers they may include. The first
/// match counts.
struct Layer {
  std::string name;
  std::regex files;
  std::set<std::string> may_include;
};

const std::vector<Layer>& layers() {
  const std::set<std::string> base{"rules", "base"};
  const std::set<std::string> parts{"rules", "base", "parts"};
  const std::set<std::string> core{"rules", "base", "parts", "engine", "local softmax", "variants", "face"};
  const std::set<std::string> any{"rules",    "base", "parts",     "engine", "local softmax",
                                  "variants", "face", "reference", "io",     "analysis", "baselines",
                                  "lavo",     "mpi",  "programs"};
  static const std::vector<Layer> table{
      {"rules", std::regex("include/linattn/(version|error|problem)\\.hpp"), {"rules"}},
      {"base", std::regex("include/linattn/(config|half|kokkos_compat|tensor|workspace|simd)\\.hpp"),
       base},
      {"parts",
       std::regex(
           "include/linattn/(call|inputs|plan|rows|launch|team|tile|tile_product|tile_tensor_core|state|mask|noise|dropout|normaliser|feature_map|block_diagonal|variant)\\.hpp"),
       parts},
      {"engine", std::regex("include/linattn/engine/.*"), {"rules", "base", "parts", "engine"}},
      {"local softmax",
       std::regex("include/linattn/local_softmax(\\.hpp|/.*)"),
       {"rules", "base", "parts", "local softmax"}},
      {"variants",
       std::regex("include/linattn/((affine|taylor|performer)\\.hpp|variants(\\.hpp|/.*))"),
       {"rules", "base", "parts", "local softmax", "variants"}},
      {"face", std::regex("include/linattn/(attention|joined|projected|exact|instantiations|linattn)\\.hpp"), core},
      {"face", std::regex("src/engine/.*"), core},
      {"reference", std::regex("include/linattn/reference/.*"), {"rules", "reference"}},
      {"io", std::regex("(include/linattn|src)/io/.*"), {"rules", "base", "io"}},
      {"baselines",
       std::regex("(include/linattn|src)/baselines/.*"),
       {"rules", "base", "parts", "engine", "local softmax", "variants", "face", "baselines"}},
      {"analysis",
       std::regex("(include/linattn|src)/analysis/.*"),
       {"rules", "base", "parts", "engine", "local softmax", "analysis"}},
      {"lavo",
       std::regex("(include/linattn|src)/lavo/.*"),
       {"rules", "base", "parts", "engine", "local softmax", "lavo"}},
      {"mpi",
       std::regex("(include/linattn|src)/mpi/.*"),
       {"rules", "base", "parts", "engine", "local softmax", "variants", "face", "analysis", "lavo",
        "mpi"}},
      {"programs", std::regex("(apps|perf|tests)/.*"), any},
  };
  return table;
}

/// Headers of other projects and the files that may include them.
struct External {
  std::string name;
  std::regex headers;
  std::regex files;
};

const std::vector<External>& externals() {
  static const std::vector<External> table{
      {"HDF5", std::regex("hdf5.*\\.h|H5.*\\.h"), std::regex("src/io/.*|tests/.*")},
      {"MPI", std::regex("mpi\\.h"), std::regex("(include/linattn|src)/mpi/.*|(apps|tests)/.*")},
      {"JSON or CLI11", std::regex("(nlohmann|CLI)/.*"), std::regex("(apps|tests)/.*")},
      {"GoogleTest", std::regex("(gtest|gmock)/.*"), std::regex("tests/.*")},
      {"Google Benchmark", std::regex("benchmark/.*"), std::regex("perf/.*")},
      {"Random123", std::regex("Random123/.*"), std::regex("include/linattn/noise\\.hpp|tests/.*")},
      {"Kokkos Kernels", std::regex("Kokkos(Blas|Batched|Kernels|Sparse).*"),
       std::regex("(include/linattn|src)/(analysis|lavo)/.*|(perf|tests)/.*")},
      {"Kokkos", std::regex("Kokkos_.*"),
       std::regex("(?!include/linattn/((version|error|problem)\\.hpp|reference/)).*")},
  };
  return table;
}

const Layer* layer_of(const std::string& file) {
  for (const Layer& layer : layers()) {
    if (std::regex_match(file, layer.files)) {
      return &layer;
    }
  }
  return nullptr;
}

std::string read(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream) {
    throw std::runtime_error("cannot read " + path.string());
  }
  return text.str();
}

std::vector<std::string> sources_below(const fs::path& root) {
  std::vector<std::string> files;
  for (const char* folder : {"include", "src", "apps", "perf", "tests"}) {
    if (!fs::is_directory(root / folder)) {
      continue;
    }
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension == ".hpp" || extension == ".cpp") {
        files.push_back(fs::relative(entry.path(), root).generic_string());
      }
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

struct Include {
  std::string text;    ///< as written
  std::string target;  ///< file of ours below the root, or empty
};

std::vector<Include> includes_of(const fs::path& root, const std::string& file,
                                 const std::string& text) {
  static const std::regex directive("[ \\t]*#[ \\t]*include[ \\t]*([<\"])([^>\"]+)[>\"].*");
  std::vector<Include> includes;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (!std::regex_match(line, match, directive)) {
      continue;
    }
    Include include{match[2], ""};
    const fs::path beside = (fs::path(file).parent_path() / include.text).lexically_normal();
    if (match[1] == "\"" && fs::exists(root / beside)) {
      include.target = beside.generic_string();
    } else if (include.text.rfind("linattn/", 0) == 0) {
      include.target = "include/" + include.text;
    }
    includes.push_back(include);
  }
  return includes;
}

bool reaches(const std::map<std::string, std::set<std::string>>& graph, const std::string& from,
             const std::string& goal, std::set<std::string>& seen) {
  const auto node = graph.find(from);
  if (node == graph.end()) {
    return false;
  }
  for (const std::string& next : node->second) {
    if (next == goal || (seen.insert(next).second && reaches(graph, next, goal, seen))) {
      return true;
    }
  }
  return false;
}

/// One sentence for each breach of the layers in the tree below root.
std::vector<std::string> breaches(const fs::path& root) {
  static const std::regex internals("\\bKokkos\\s*::\\s*Impl\\b");
  static const std::regex version_test("[ \\t]*#[ \\t]*(if|elif)\\b.*\\bKOKKOS_VERSION.*");
  const std::string compatibility = "include/linattn/kokkos_compat.hpp";
  std::vector<std::string> found;
  std::map<std::string, std::set<std::string>> graph;
  for (const std::string& file : sources_below(root)) {
    const Layer* layer = layer_of(file);
    if (layer == nullptr) {
      found.push_back(file + " belongs to no layer");
      continue;
    }
    const std::string text = read(root / file);
    if (file != "tests/layering/layering_test.cpp" && std::regex_search(text, internals)) {
      found.push_back(file + " names Kokkos::Impl");
    }
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (file != compatibility && std::regex_match(line, version_test)) {
        found.push_back(file + " depends on the version of Kokkos; only " + compatibility + " may");
      }
    }
    for (const Include& include : includes_of(root, file, text)) {
      if (!include.target.empty()) {
        graph[file].insert(include.target);
        const Layer* target = layer_of(include.target);
        if (target == nullptr) {
          found.push_back(file + " includes " + include.target + ", which belongs to no layer");
        } else if (layer->may_include.count(target->name) == 0) {
          found.push_back(file + " (" + layer->name + ") includes " + include.target + " (" +
                          target->name + ")");
        }
        continue;
      }
      for (const External& external : externals()) {
        if (std::regex_match(include.text, external.headers)) {
          if (!std::regex_match(file, external.files)) {
            found.push_back(file + " includes " + include.text + " (" + external.name + ")");
          }
          break;
        }
      }
    }
  }
  for (const auto& [file, targets] : graph) {
    std::set<std::string> seen;
    if (reaches(graph, file, file, seen)) {
      found.push_back(file + " includes itself through others");
    }
  }
  return found;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    text += line + "\n";
  }
  return text;
}

TEST(Layering, TreeHoldsToTheLayers) {
  const fs::path root = LINATTN_SOURCE_DIR;
  ASSERT_GT(sources_below(root).size(), 5u);
  const std::vector<std::string> found = breaches(root);
  EXPECT_TRUE(found.empty()) << joined(found);
}

/// A small tree with one planted breach; the checker must name exactly that one.
class PlantedBreach : public ::testing::Test {
 protected:
  void SetUp() override {
    const ::testing::TestInfo* info = ::testing::UnitTest::GetInstance()->current_test_info();
    m_root = fs::temp_directory_path() /
             (std::string("linattn-layering-") + info->name() + "-" + std::to_string(getpid()));
    write("include/linattn/error.hpp", "#include <string>\n");
    write("include/linattn/tensor.hpp",
          "#include <Kokkos_Core.hpp>\n#include <linattn/error.hpp>\n");
    write("include/linattn/state.hpp", "#include <linattn/tensor.hpp>\n");
    write("include/linattn/engine/forward.hpp", "#include <linattn/state.hpp>\n");
    write("include/linattn/variants.hpp", "#include <linattn/state.hpp>\n");
    write("include/linattn/io/file.hpp", "#include <linattn/tensor.hpp>\n");
    write("src/io/file.cpp", "#include <hdf5.h>\n#include <linattn/io/file.hpp>\n");
    ASSERT_TRUE(breaches(m_root).empty()) << joined(breaches(m_root));
  }

  void TearDown() override { fs::remove_all(m_root); }

  void write(const std::string& file, const std::string& text) const {
    fs::create_directories((m_root / file).parent_path());
    std::ofstream(m_root / file) << text;
  }

  void expect_one(const std::string& sentence) const {
    EXPECT_EQ(breaches(m_root), std::vector<std::string>{sentence});
  }

  fs::path m_root;
};

TEST_F(PlantedBreach, EngineIncludesNamedVariant) {
  write("include/linattn/engine/backward.hpp", "#  include <linattn/variants.hpp>  // elu\n");
  expect_one(
      "include/linattn/engine/backward.hpp (engine) includes include/linattn/variants.hpp "
      "(variants)");
}

TEST_F(PlantedBreach, CoreIncludesIo) {
  write("include/linattn/plan.hpp", "#include \"io/file.hpp\"\n");
  expect_one("include/linattn/plan.hpp (parts) includes include/linattn/io/file.hpp (io)");
}

TEST_F(PlantedBreach, CoreIncludesHdf5) {
  write("include/linattn/plan.hpp", "#include <hdf5.h>\n");
  expect_one("include/linattn/plan.hpp includes hdf5.h (HDF5)");
}

TEST_F(PlantedBreach, LibraryIncludesJson) {
  write("src/io/json.cpp", "#include <nlohmann/json.hpp>\n");
  expect_one("src/io/json.cpp includes nlohmann/json.hpp (JSON or CLI11)");
}

TEST_F(PlantedBreach, ReferenceIncludesEngine) {
  write("include/linattn/reference/dense.hpp", "#include <linattn/engine/forward.hpp>\n");
  expect_one(
      "include/linattn/reference/dense.hpp (reference) includes include/linattn/engine/forward.hpp "
      "(engine)");
}

TEST_F(PlantedBreach, ReferenceIncludesKokkos) {
  write("include/linattn/reference/dense.hpp", "#include <Kokkos_Core.hpp>\n");
  expect_one("include/linattn/reference/dense.hpp includes Kokkos_Core.hpp (Kokkos)");
}

TEST_F(PlantedBreach, KokkosInternals) {
  write("include/linattn/plan.hpp", "using T = Kokkos :: Impl::Thing;\n");
  expect_one("include/linattn/plan.hpp names Kokkos::Impl");
}

TEST_F(PlantedBreach, VersionOfKokkosOutsideItsHeader) {
  write("include/linattn/plan.hpp", "#if KOKKOS_VERSION < 40000\n#endif\n");
  expect_one(
      "include/linattn/plan.hpp depends on the version of Kokkos; only "
      "include/linattn/kokkos_compat.hpp may");
}

TEST_F(PlantedBreach, CycleOfIncludes) {
  write("include/linattn/tile.hpp", "#include <linattn/plan.hpp>\n");
  write("include/linattn/plan.hpp", "#include <linattn/tile.hpp>\n");
  EXPECT_EQ(breaches(m_root),
            (std::vector<std::string>{"include/linattn/plan.hpp includes itself through others",
                                      "include/linattn/tile.hpp includes itself through others"}));
}

TEST_F(PlantedBreach, FileOfNoLayer) {
  write("include/linattn/miscellany.hpp", "");
  expect_one("include/linattn/miscellany.hpp belongs to no layer");
}

}  // namespace
