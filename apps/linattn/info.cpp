// SPDX-License-Identifier: BSD-3-Clause
#include <sys/utsname.h>

#include <Kokkos_Core.hpp>
#include <array>
#include <cstdlib>
#include <iostream>
#include <linattn/io/library.hpp>
#include <linattn/kokkos_compat.hpp>
#include <linattn/simd.hpp>
#include <linattn/version.hpp>
#include <memory>
#include <sstream>

#include "commands.hpp"
#include "compute.hpp"
#include "execution.hpp"
#include "json_output.hpp"
#include "options.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "GCC " __VERSION__;
#else
  return "unknown";
#endif
}

std::string kokkos_version() {
  return detail::message(KOKKOS_VERSION / 10000, ".", KOKKOS_VERSION / 100 % 100, ".",
                         KOKKOS_VERSION % 100);
}

std::string machine() {
  utsname name{};
  if (::uname(&name) != 0) return "unknown";
  return detail::message(name.sysname, " ", name.release, " ", name.machine);
}

/// Variables that change what is run; null where they are not set.
Json environment() {
  Json variables = Json::object();
  for (const char* name : {"OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "KOKKOS_NUM_THREADS",
                           "KOKKOS_DEVICE_ID", "KOKKOS_PROFILE_LIBRARY", "KOKKOS_TOOLS_LIBS",
                           "CUDA_VISIBLE_DEVICES", "HDF5_USE_FILE_LOCKING"}) {
    const char* value = std::getenv(name);
    variables[name] = value == nullptr ? Json() : Json(value);
  }
  return variables;
}

/// What there is of execution spaces, or why Kokkos does not start here.
void describe_kokkos(Json& document) {
  document["spaces"] = Json::array();
  document["kokkos_configuration"] = nullptr;
  try {
    const Runtime runtime;
    for (const Space space : enabled_spaces())
      document["spaces"].push_back(
          {{"name", to_string(space)}, {"concurrency", concurrency(space)}});
    std::ostringstream configuration;
    Kokkos::print_configuration(configuration, false);
    document["kokkos_configuration"] = configuration.str();
  } catch (const EnvironmentFailure& error) {
    document["kokkos_failure"] = error.what();
  }
}

Json collect() {
  Json document = json_document("info");
  document["kokkos"] = kokkos_version();
  document["hdf5"] = io::library_version();
  document["compiler"] = compiler();
  document["cxx_standard"] = __cplusplus;
  document["build_type"] = LINATTN_APP_BUILD_TYPE;
  document["compile_options"] = LINATTN_APP_COMPILE_OPTIONS;
  document["simd_bytes"] = detail::vector_lanes<float> * static_cast<int>(sizeof(float));
  document["machine"] = machine();
  document["default_space"] = to_string(default_space());
  document["variants"] = Json::array();
  for (const VariantInfo& info : variants()) document["variants"].push_back(info.name);
  document["environment"] = environment();  // before Kokkos starts, which adds to it
  describe_kokkos(document);
  return document;
}

void print(const Json& document) {
  const auto line = [](const std::string& name, const std::string& text) {
    std::cout << padded(name, 15) << text << '\n';
  };
  const auto text = [&](const char* key) { return document.at(key).get<std::string>(); };
  line("LinAttn", text("linattn"));
  line("Kokkos", text("kokkos"));
  line("HDF5", text("hdf5"));
  line("compiler", text("compiler"));
  line("build", text("build_type") + ", " + text("compile_options"));
  line("SIMD", std::to_string(document.at("simd_bytes").get<int>()) + " bytes");
  line("machine", text("machine"));
  for (const Json& space : document.at("spaces"))
    line("space",
         detail::message(space.at("name").get<std::string>(), ", concurrency ",
                         space.at("concurrency").get<int>(),
                         space.at("name") == document.at("default_space") ? " (default)" : ""));
  line("variants", variant_names());
  for (const auto& [name, value] : document.at("environment").items())
    line(name, value.is_null() ? "not set" : value.get<std::string>());
  if (document.contains("kokkos_failure")) line("failure", text("kokkos_failure"));
  if (!document.at("kokkos_configuration").is_null())
    std::cout << "Kokkos configuration\n" << text("kokkos_configuration");
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  auto target = std::make_shared<std::string>();
  CLI::App* const command =
      app.add_subcommand("info", "Configuration, to paste into a bug report.");
  add_json_option(*command, *target);
  command->callback([target, &action] {
    action = [target] {
      const JsonOutput json(*target, {});
      const Json document = collect();
      if (!json.is_stdout()) print(document);
      json.write(document);
      return ExitStatus::done;
    };
  });
}

}  // namespace LinAttn::app
