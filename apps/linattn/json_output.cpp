// SPDX-License-Identifier: BSD-3-Clause
#include "json_output.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>
#include <linattn/error.hpp>
#include <linattn/version.hpp>

namespace LinAttn::app {
namespace {

[[noreturn]] void refuse(const std::string& target, const std::string& reason) {
  throw EnvironmentFailure("--json: " + target + ": cannot be written: " + reason);
}

/// Bytes of a file of ours on the way to the disk.
class Descriptor {
 public:
  Descriptor(const std::string& target, const std::string& name, int flags)
      : m_target(target), m_descriptor(::open(name.c_str(), flags | O_WRONLY | O_CLOEXEC, 0666)) {
    if (m_descriptor < 0) refuse(target, std::strerror(errno));
  }
  ~Descriptor() {
    if (m_descriptor >= 0) ::close(m_descriptor);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  void write(const std::string& text) {
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t written = ::write(m_descriptor, text.data() + done, text.size() - done);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) refuse(m_target, std::strerror(errno));
      done += static_cast<std::size_t>(written);
    }
  }

  void finish(bool is_file) {
    const bool synced = !is_file || ::fsync(m_descriptor) == 0;
    const bool closed = ::close(m_descriptor) == 0;
    m_descriptor = -1;
    if (!synced || !closed) refuse(m_target, std::strerror(errno));
  }

 private:
  const std::string& m_target;
  int m_descriptor;
};

/// Whether the target exists and is a device, a pipe or the like: written in place, never replaced.
bool is_special(const std::string& target) {
  struct stat status {};
  if (::stat(target.c_str(), &status) != 0) {
    if (errno != ENOENT) refuse(target, std::strerror(errno));
    return false;
  }
  if (S_ISDIR(status.st_mode)) refuse(target, "it is a directory");
  return !S_ISREG(status.st_mode);
}

/// Behind symbolic links, beside the target.
std::string temporary_name(const std::string& target) {
  return target + ".tmp-" + std::to_string(::getpid());
}

std::string real_name(const std::string& target) {
  std::error_code error;
  if (!std::filesystem::is_symlink(target, error)) return target;
  const auto real = std::filesystem::weakly_canonical(target, error);
  if (error) refuse(target, error.message());
  return real.string();
}

struct Unlinker {
  std::string name;
  ~Unlinker() {
    if (!name.empty()) ::unlink(name.c_str());
  }
};

}  // namespace

JsonOutput::JsonOutput(const std::string& target, const std::vector<std::string>& others)
    : m_target(target) {
  if (m_target.empty() || is_stdout()) return;
  std::error_code error;
  // names are compared as well: what the command is about to write need not exist yet
  const auto resolved = [&](const std::string& name) {
    auto path = std::filesystem::absolute(name, error);
    if (std::filesystem::is_symlink(path, error))  // it may lead to a file yet to come
      path = path.parent_path() / std::filesystem::read_symlink(path, error);
    return std::filesystem::weakly_canonical(path, error);
  };
  for (const std::string& other : others)
    if (target == other || std::filesystem::equivalent(target, other, error) ||
        resolved(target) == resolved(other))
      throw InvalidArgument("--json: expected a file of its own, found " + target +
                            ", which the command reads or writes");
  if (is_special(m_target)) return;
  const Unlinker probe{temporary_name(real_name(m_target))};
  Descriptor(m_target, probe.name, O_CREAT | O_TRUNC);
}

void JsonOutput::write(const Json& document) const {
  if (m_target.empty()) return;
  // A file name need not be UTF-8; what is not is shown by replacement characters.
  const std::string text = document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (is_stdout()) {
    std::cout << text;
    return;
  }
  if (is_special(m_target)) {
    Descriptor file(m_target, m_target, 0);
    file.write(text);
    file.finish(false);
    return;
  }
  const std::string name = real_name(m_target);
  Unlinker temporary{temporary_name(name)};
  Descriptor file(m_target, temporary.name, O_CREAT | O_TRUNC);
  file.write(text);
  file.finish(true);
  if (::rename(temporary.name.c_str(), name.c_str()) != 0) refuse(m_target, std::strerror(errno));
  temporary.name.clear();
}

Json json_document(const char* command) {
  return Json{{"linattn", LINATTN_VERSION}, {"command", command}};
}

Json to_json(const Problem& p) {
  return Json{{"batch", p.batch}, {"heads", p.heads}, {"kv_heads", p.kv_heads},
              {"nq", p.nq},       {"nk", p.nk},       {"d", p.d},
              {"dv", p.dv}};
}

Json to_json(const io::Value& value) {
  if (value.is_string()) return value.as_string();
  if (value.is_real()) return value.as_double();
  return value.is_large() ? Json(value.as_uint64()) : Json(value.as_int64());
}

Json to_json(const HostMoments& moments) {
  Json json = Json::object();
  for (const char* name : moment_names)
    if (moments.contains(name)) json[name] = moments.at(name);
  return json;
}

Json to_json(const Settings& settings) {
  Json json = Json::object();
  for (const auto& [name, value] : settings.values()) json[name] = to_json(value);
  return json;
}

Json to_json(const PassReport& report) {
  const Plan& plan = report.plan;
  return Json{{"seconds", report.median()},
              {"runs", report.seconds},
              {"workspace_bytes", report.workspace_bytes},
              {"plan",
               {{"chunk", plan.chunk},
                {"segments", plan.segments},
                {"tiles", plan.tiles},
                {"workers", plan.workers},
                {"team_size", plan.team_size},
                {"tile_bytes", plan.tile_bytes}}}};
}

Json to_json(const Comparison& c) {
  Json json{{"quantity", c.quantity}, {"error", c.error}, {"tolerance", c.tolerance}, {"ok", c.ok},
            {"elements", c.elements}, {"worst", nullptr}};
  if (c.elements > 0)
    json["worst"] = {{"index", c.worst}, {"expected", c.expected}, {"found", c.found}};
  return json;
}

}  // namespace LinAttn::app
