// SPDX-License-Identifier: BSD-3-Clause
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <linattn/io/tensor_file.hpp>
#include <linattn/io/writer.hpp>
#include <optional>

#include "output_driver.hpp"
#include "reader_impl.hpp"

namespace LinAttn::io {
namespace {

using hdf5::Handle;
using hdf5::Session;

constexpr std::uint64_t largest_chunk_bytes = std::uint64_t{16} << 20;
constexpr int longest_link_chain = 40;
constexpr std::uint64_t longest_attribute_bytes = std::uint64_t{64} << 20;

std::uint64_t saturating_product(std::uint64_t a, std::uint64_t b) {
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  return b != 0 && a > most / b ? most : a * b;
}

std::vector<hsize_t> dimensions(std::span<const std::int64_t> extents) {
  return {extents.begin(), extents.end()};
}

Handle simple_space(std::span<const std::int64_t> extents) {
  if (extents.empty()) return {H5Screate(H5S_SCALAR), H5Sclose};
  const auto dims = dimensions(extents);
  return {H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose};
}

Handle file_type(ElementType type) {
  switch (type) {
    case ElementType::f64:
      return {H5Tcopy(H5T_IEEE_F64LE), H5Tclose};
    case ElementType::f32:
      return {H5Tcopy(H5T_IEEE_F32LE), H5Tclose};
    case ElementType::f16:
      return half_type(H5T_ORDER_LE);
    case ElementType::u8:
      return {H5Tcopy(H5T_STD_U8LE), H5Tclose};
    case ElementType::i64:
      return {H5Tcopy(H5T_STD_I64LE), H5Tclose};
  }
  return {};
}

std::string parent_of(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
}

bool is_well_formed(const std::string& path) {
  return path.size() > 1 && path.front() == '/' && path.back() != '/' &&
         path.find("//") == std::string::npos && path.find('\0') == std::string::npos;
}

}  // namespace

std::vector<std::int64_t> chunk_extents(std::span<const std::int64_t> extents,
                                        std::size_t element_bytes) {
  std::vector<std::int64_t> chunk(extents.begin(), extents.end());
  for (std::int64_t& extent : chunk) extent = std::max<std::int64_t>(extent, 1);
  const auto bytes = [&] {
    std::uint64_t product = element_bytes;
    for (const std::int64_t extent : chunk)
      product = saturating_product(product, static_cast<std::uint64_t>(extent));
    return product;
  };
  for (std::int64_t& extent : chunk)
    while (extent > 1 && bytes() > largest_chunk_bytes) extent -= extent / 2;
  return chunk;
}

struct Writer::Impl {
  std::filesystem::path target;     // as the caller named it
  std::filesystem::path real_name;  // behind symbolic links
  std::filesystem::path temporary;
  std::optional<mode_t> old_mode;
  WriteOptions options;
  std::unique_ptr<OutputStream> stream;
  OutputAccess access;
  Handle file;

  Impl(const std::filesystem::path& path, const WriteOptions& write_options)
      : target(path), options(write_options) {
    if (options.deflate < 0 || options.deflate > 9)
      throw InvalidArgument(detail::message(
          "LinAttn::io: expected a deflate level from 0 to 9, found ", options.deflate));
    find_real_name();
    create_temporary();
    const Session session;
    access = output_access(*stream);
    if (access.list)
      file = Handle(H5Fcreate(temporary.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.list.get()),
                    H5Fclose);
    if (!file) {
      const std::string reason = hdf5::take_error();
      abandon();
      refuse("cannot be created: " + reason);
    }
  }

  ~Impl() {
    const Session session;
    abandon();
  }

  void abandon() noexcept {
    file.close();
    access.list.close();
    access.driver.close();
    stream.reset();
    if (!temporary.empty()) ::unlink(temporary.c_str());
    temporary.clear();
  }

  [[noreturn]] void refuse(const std::string& reason) const {
    throw EnvironmentFailure(hdf5::one_line(detail::message(target.string(), ": ", reason)));
  }

  [[noreturn]] void fail(const std::string& object, const std::string& text) const {
    throw InvalidArgument(
        hdf5::one_line(detail::message(target.string(), ": ", object, ": ", text)));
  }

  void find_real_name() {
    if (target.empty())
      throw InvalidArgument("expected the name of an output file, found an empty name");
    std::error_code error;
    real_name = target;
    for (int links = 0; std::filesystem::is_symlink(real_name, error); ++links) {
      const auto next = std::filesystem::read_symlink(real_name, error);
      if (error || links == longest_link_chain)
        refuse("cannot be written: too many symbolic links");
      real_name = real_name.parent_path() / next;
    }
    struct stat status {};
    if (::stat(real_name.c_str(), &status) == 0) {
      if (S_ISDIR(status.st_mode)) refuse("cannot be written: it is a directory");
      if (!S_ISREG(status.st_mode)) refuse("cannot be written: it is not a regular file");
      if (::access(real_name.c_str(), W_OK) != 0)
        refuse(detail::message("cannot be replaced: ", std::strerror(errno)));
      old_mode = status.st_mode & 07777;
    } else if (errno != ENOENT) {
      refuse(detail::message("cannot be written: ", std::strerror(errno)));
    } else if (!real_name.has_filename()) {
      refuse("cannot be written: it names a directory");
    }
  }

  void create_temporary() {
    static std::atomic<unsigned> count{0};
    int descriptor = -1;
    std::filesystem::path name;
    do {
      name = real_name;
      name += detail::message(".tmp-", ::getpid(), "-", count++);
      descriptor = ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (descriptor < 0 && errno == EEXIST);
    if (descriptor < 0)
      refuse(detail::message("cannot be written: ", name.string(), ": ", std::strerror(errno)));
    temporary = std::move(name);
    stream = std::make_unique<OutputStream>(descriptor);
  }

  void require_open(const std::string& object) const {
    if (!file) fail(object, "the file is complete, nothing can be added");
  }

  /// Turns a full disk into the error it is, whatever HDF5 made of it.
  void check_stream() const {
    if (stream && stream->error() != 0)
      refuse(detail::message("cannot be written: ", std::strerror(stream->error())));
  }

  [[noreturn]] void fail_hdf5(const std::string& object) const {
    const std::string reason = hdf5::take_error();
    check_stream();
    refuse(object + ": cannot be written: " + reason);
  }

  Handle open_group(const std::string& path) const {
    Handle here(H5Gopen2(file.get(), "/", H5P_DEFAULT), H5Oclose);
    if (!here) fail_hdf5("/");
    if (path == "/") return here;
    if (!is_well_formed(path)) fail(path, "expected a path such as /output/o");
    for (std::size_t from = 1; from < path.size();) {
      const std::size_t to = std::min(path.find('/', from), path.size());
      const std::string name = path.substr(from, to - from);
      from = to + 1;
      Handle next;
      if (H5Lexists(here.get(), name.c_str(), H5P_DEFAULT) > 0) {
        next = Handle(H5Oopen(here.get(), name.c_str(), H5P_DEFAULT), H5Oclose);
        if (next && H5Iget_type(next.get()) != H5I_GROUP)
          fail(path, "expected a group at '" + name + "', found a dataset");
      } else {
        next = Handle(H5Gcreate2(here.get(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                      H5Oclose);
      }
      if (!next) fail_hdf5(path);
      here = std::move(next);
    }
    return here;
  }

  bool exists(const std::string& path) const {
    if (path == "/") return true;
    for (std::size_t to = 0; to != std::string::npos;) {
      to = path.find('/', to + 1);
      if (H5Lexists(file.get(), path.substr(0, to).c_str(), H5P_DEFAULT) <= 0) return false;
    }
    return true;
  }

  Handle open_object(const std::string& path) const {
    if (path != "/" && !is_well_formed(path)) fail(path, "expected a path such as /output/o");
    if (!exists(path)) return open_group(path);
    Handle object(H5Oopen(file.get(), path.c_str(), H5P_DEFAULT), H5Oclose);
    if (!object) fail_hdf5(path);
    return object;
  }

  void write_attribute(const Handle& object, const std::string& path, const std::string& name,
                       hid_t stored_type, hid_t memory_type, hid_t space, const void* bytes) const {
    if (H5Aexists(object.get(), name.c_str()) > 0 && H5Adelete(object.get(), name.c_str()) < 0)
      fail_hdf5(path);
    const Handle attribute(
        H5Acreate2(object.get(), name.c_str(), stored_type, space, H5P_DEFAULT, H5P_DEFAULT),
        H5Aclose);
    if (!attribute || (bytes != nullptr && H5Awrite(attribute.get(), memory_type, bytes) < 0))
      fail_hdf5("attribute '" + name + "' of " + path);
  }

  void copy_attribute(const Reader& source, hid_t from, const Handle& to, const std::string& path,
                      const std::string& name) const {
    const std::string where = "attribute '" + name + "' of " + path;
    const Handle attribute(H5Aopen(from, name.c_str(), H5P_DEFAULT), H5Aclose);
    const Handle stored(attribute ? H5Aget_type(attribute.get()) : -1, H5Tclose);
    const Handle space(attribute ? H5Aget_space(attribute.get()) : -1, H5Sclose);
    const Handle type(stored ? H5Tcopy(stored.get()) : -1,
                      H5Tclose);  // named types become plain ones
    if (!space || !type) source.impl().fail(where, hdf5::take_error());
    if (H5Tdetect_class(type.get(), H5T_REFERENCE) > 0) return;

    const hssize_t elements = H5Sget_simple_extent_npoints(space.get());
    const std::uint64_t bytes = saturating_product(
        elements < 0 ? 0 : static_cast<std::uint64_t>(elements), H5Tget_size(type.get()));
    if (bytes > longest_attribute_bytes)
      source.impl().fail(where, "larger than any attribute this library copies");
    if (bytes == 0 || H5Sget_simple_extent_type(space.get()) == H5S_NULL)
      return write_attribute(to, path, name, type.get(), type.get(), space.get(), nullptr);

    std::vector<std::byte> values(bytes);
    if (H5Aread(attribute.get(), type.get(), values.data()) < 0)
      source.impl().fail(where, "cannot be read: " + hdf5::take_error());
    const auto free_values = [&] {
      if (H5Tdetect_class(type.get(), H5T_VLEN) > 0 || H5Tdetect_class(type.get(), H5T_STRING) > 0)
        hdf5::reclaim(type.get(), space.get(), values.data());
    };
    try {
      write_attribute(to, path, name, type.get(), type.get(), space.get(), values.data());
    } catch (...) {
      free_values();
      throw;
    }
    free_values();
  }
};

Writer::Writer(const std::filesystem::path& target, const WriteOptions& options)
    : m_impl(std::make_unique<Impl>(target, options)) {
  attribute("/", "schema", schema_name);
}

Writer::Writer(Writer&&) noexcept = default;
Writer& Writer::operator=(Writer&&) noexcept = default;
Writer::~Writer() = default;

const std::filesystem::path& Writer::target() const noexcept { return m_impl->target; }

void Writer::write(const std::string& dataset, const Array& array) {
  const Session session;
  Impl& impl = *m_impl;
  impl.require_open(dataset);
  if (!is_well_formed(dataset)) impl.fail(dataset, "expected a path such as /output/o");
  const Handle group = impl.open_group(parent_of(dataset));
  const std::string name = dataset.substr(dataset.rfind('/') + 1);
  if (H5Lexists(group.get(), name.c_str(), H5P_DEFAULT) > 0)
    impl.fail(dataset, "expected a new name, found an object of that name");

  const Handle space = simple_space(array.extents());
  const Handle stored = file_type(array.type());
  const Handle memory = native_type(array.type());
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (!space || !stored || !memory || !creation) impl.fail_hdf5(dataset);
  H5Pset_obj_track_times(creation.get(), false);  // equal runs give equal bytes
  if (impl.options.deflate > 0 && array.rank() > 0 && array.size() > 0) {
    if (H5Zfilter_avail(H5Z_FILTER_DEFLATE) <= 0)
      impl.refuse(dataset + ": cannot be compressed: this HDF5 has no deflate filter");
    const auto chunk = dimensions(chunk_extents(array.extents(), size_of(array.type())));
    if (H5Pset_chunk(creation.get(), static_cast<int>(chunk.size()), chunk.data()) < 0 ||
        H5Pset_shuffle(creation.get()) < 0 ||
        H5Pset_deflate(creation.get(), static_cast<unsigned>(impl.options.deflate)) < 0)
      impl.fail_hdf5(dataset);
  }
  Handle handle(H5Dcreate2(group.get(), name.c_str(), stored.get(), space.get(), H5P_DEFAULT,
                           creation.get(), H5P_DEFAULT),
                H5Dclose);
  if (!handle ||
      (array.size() > 0 &&
       H5Dwrite(handle.get(), memory.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, array.data()) < 0) ||
      !handle.close())
    impl.fail_hdf5(dataset);
  impl.check_stream();
}

void Writer::group(const std::string& path) {
  const Session session;
  m_impl->require_open(path);
  m_impl->open_group(path);
  m_impl->check_stream();
}

void Writer::attribute(const std::string& object, const std::string& name, const Value& value) {
  const Session session;
  Impl& impl = *m_impl;
  impl.require_open(object);
  if (name.empty() || name.find('\0') != std::string::npos)
    impl.fail(object, "expected the name of an attribute, found an empty or malformed one");
  const Handle target = impl.open_object(object);
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  if (value.is_string()) {
    const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
    if (!type || H5Tset_size(type.get(), H5T_VARIABLE) < 0 ||
        H5Tset_cset(type.get(), H5T_CSET_UTF8) < 0)
      impl.fail_hdf5(object);
    const char* const text = value.as_string().c_str();
    impl.write_attribute(target, object, name, type.get(), type.get(), space.get(), &text);
  } else if (value.is_real()) {
    const double number = value.as_double();
    impl.write_attribute(target, object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, space.get(),
                         &number);
  } else if (value.is_large()) {
    const std::uint64_t number = value.as_uint64();
    impl.write_attribute(target, object, name, H5T_STD_U64LE, H5T_NATIVE_UINT64, space.get(),
                         &number);
  } else {
    const std::int64_t number = value.as_int64();
    impl.write_attribute(target, object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, space.get(),
                         &number);
  }
  impl.check_stream();
}

void Writer::copy_attributes(const std::filesystem::path& source, const std::string& object) {
  const Session session;
  Impl& impl = *m_impl;
  impl.require_open(object);
  const Reader reader(source);
  const Handle from = reader.impl().open(object, "an object");
  const Handle to = impl.open_object(object);
  for (const std::string& name : reader.attribute_names(object))
    impl.copy_attribute(reader, from.get(), to, object, name);
  impl.check_stream();
}

void Writer::commit() {
  const Session session;
  Impl& impl = *m_impl;
  impl.require_open("/");
  const bool flushed = H5Fflush(impl.file.get(), H5F_SCOPE_GLOBAL) >= 0;
  const bool closed = impl.file.close();
  const std::string reason = flushed && closed ? "" : hdf5::take_error();
  impl.stream->finish();
  try {
    impl.check_stream();
    if (!reason.empty()) impl.refuse("cannot be completed: " + reason);
    if (impl.old_mode) ::chmod(impl.temporary.c_str(), *impl.old_mode);
    if (::rename(impl.temporary.c_str(), impl.real_name.c_str()) != 0)
      impl.refuse(detail::message("cannot be given its name: ", std::strerror(errno)));
    impl.temporary.clear();
  } catch (...) {
    impl.abandon();
    throw;
  }
  impl.abandon();
}

}  // namespace LinAttn::io
