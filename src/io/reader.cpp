// SPDX-License-Identifier: BSD-3-Clause
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <linattn/io/reader.hpp>
#include <new>

#include "reader_impl.hpp"

namespace LinAttn::io {
namespace {

using hdf5::Handle;
using hdf5::Session;

constexpr std::uint64_t small_dataset_bytes = std::uint64_t{64} << 20;
constexpr std::size_t longest_fixed_string = std::size_t{1} << 20;

#if (H5_VERSION_GE(1, 10, 7) && !H5_VERSION_GE(1, 12, 0)) || H5_VERSION_GE(1, 12, 1)
constexpr bool can_choose_locking = true;
void set_locking(hid_t access, bool lock) { H5Pset_file_locking(access, lock, true); }
#else
constexpr bool can_choose_locking = false;
void set_locking(hid_t, bool) {}
#endif

std::uint64_t memory_of_machine() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGE_SIZE);
  if (pages <= 0 || page <= 0) return std::numeric_limits<std::uint64_t>::max();
  return static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page);
}

// HDF5 puts its signature at 0 or, behind a user block, at 512 times a power of two.
bool has_signature(int descriptor, off_t size) {
  constexpr std::array<unsigned char, 8> signature = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
  for (off_t at = 0; at + off_t(signature.size()) <= size; at = at == 0 ? 512 : 2 * at) {
    std::array<unsigned char, 8> found{};
    if (pread(descriptor, found.data(), found.size(), at) == ssize_t(found.size()) &&
        found == signature)
      return true;
  }
  return false;
}

// HDF5 words every one of these as "unable to open file"; a user needs the difference. A FIFO would
// block the open.
void check_before_open(const std::string& name) {
  struct stat status {};
  if (stat(name.c_str(), &status) != 0)
    throw EnvironmentFailure(detail::message(name, ": cannot be opened: ", std::strerror(errno)));
  if (S_ISDIR(status.st_mode))
    throw EnvironmentFailure(detail::message(name, ": expected an HDF5 file, found a directory"));
  if (!S_ISREG(status.st_mode))
    throw EnvironmentFailure(detail::message(
        name, ": expected an HDF5 file, found something that is not a regular file"));
  const int descriptor = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0)
    throw EnvironmentFailure(detail::message(name, ": cannot be opened: ", std::strerror(errno)));
  const bool hdf5 = has_signature(descriptor, status.st_size);
  ::close(descriptor);
  if (status.st_size == 0)
    throw InvalidArgument(detail::message(name, ": expected an HDF5 file, found an empty file"));
  if (!hdf5)
    throw InvalidArgument(
        detail::message(name, ": expected an HDF5 file, found one without the HDF5 signature"));
}

Handle open_file(const std::string& name) {
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  std::string reason;
  for (const bool lock : {true, false}) {
    set_locking(access.get(), lock);
    Handle file(H5Fopen(name.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
    if (file) return file;
    const std::string latest = hdf5::take_error();
    if (reason.empty()) reason = latest;
    // Media without locks (network, read-only) are read without; a lock that somebody holds is
    // obeyed.
    const bool about_lock = reason.find("lock file") != std::string::npos;
    const bool held = reason.find("errno = " + std::to_string(EAGAIN) + ",") != std::string::npos;
    if (about_lock && (held || !lock || !can_choose_locking))
      throw EnvironmentFailure(detail::message(
          name, ": ", held ? "another process has it open for writing" : "cannot be locked", ": ",
          reason, "; the environment variable HDF5_USE_FILE_LOCKING=FALSE switches locking off"));
    if (!about_lock) break;
  }
  throw InvalidArgument(detail::message(name, ": damaged or truncated HDF5 file: ", reason));
}

// Never follows a link out of the file.
Handle link_access() {
  Handle access(H5Pcreate(H5P_LINK_ACCESS), H5Pclose);
  H5Pset_elink_cb(
      access.get(),
      [](const char*, const char*, const char*, const char*, unsigned*, hid_t, void*) -> herr_t {
        return -1;
      },
      nullptr);
  return access;
}

const char* kind_name(H5I_type_t type) {
  switch (type) {
    case H5I_GROUP:
      return "a group";
    case H5I_DATASET:
      return "a dataset";
    case H5I_DATATYPE:
      return "a named type";
    default:
      return "an object of another kind";
  }
}

bool is_one_element(hid_t space) {
  return H5Sget_simple_extent_type(space) != H5S_NULL && H5Sget_simple_extent_npoints(space) == 1;
}

std::string width_name(const char* prefix, hid_t type) {
  return prefix + std::to_string(8 * H5Tget_size(type));
}

// float16, float32 or float64 of either byte order; nothing for bfloat16, long double, VAX.
std::optional<ElementType> ieee_type(hid_t type) {
  if (H5Tequal(type, H5T_IEEE_F64LE) > 0 || H5Tequal(type, H5T_IEEE_F64BE) > 0)
    return ElementType::f64;
  if (H5Tequal(type, H5T_IEEE_F32LE) > 0 || H5Tequal(type, H5T_IEEE_F32BE) > 0)
    return ElementType::f32;
  for (const H5T_order_t order : {H5T_ORDER_LE, H5T_ORDER_BE}) {
    const Handle half = half_type(order);
    if (H5Tequal(type, half.get()) > 0) return ElementType::f16;
  }
  return {};
}

std::string type_name(hid_t type) {
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return width_name(H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int", type);
    case H5T_FLOAT: {
      if (const auto element = ieee_type(type)) return std::string(to_string(*element));
      std::size_t sign = 0, exponent = 0, exponent_bits = 0, fraction = 0, fraction_bits = 0;
      H5Tget_fields(type, &sign, &exponent, &exponent_bits, &fraction, &fraction_bits);
      return detail::message("a ", 8 * H5Tget_size(type), "-bit floating-point type with ",
                             exponent_bits, " exponent and ", fraction_bits, " fraction bits");
    }
    case H5T_STRING:
      return "string";
    case H5T_ENUM:
      return "enumeration";
    case H5T_COMPOUND:
      return "compound";
    case H5T_ARRAY:
      return "array type";
    case H5T_VLEN:
      return "variable-length type";
    case H5T_REFERENCE:
      return "reference";
    case H5T_OPAQUE:
      return "opaque";
    case H5T_BITFIELD:
      return "bit field";
    default:
      return "unknown type";
  }
}

std::string fixed_string(const std::vector<char>& bytes, H5T_str_t padding) {
  const std::string_view text(bytes.data(), bytes.size());
  if (padding == H5T_STR_SPACEPAD) {
    const auto last = text.find_last_not_of(' ');
    return std::string(text.substr(0, last == text.npos ? 0 : last + 1));
  }
  return std::string(text.substr(0, text.find('\0')));
}

/// \returns what is wrong, empty if the value was read.
std::string read_value(hid_t attribute, Value& value) {
  const Handle type(H5Aget_type(attribute), H5Tclose);
  const Handle space(H5Aget_space(attribute), H5Sclose);
  if (!type || !space) return hdf5::take_error();
  const H5T_class_t type_class = H5Tget_class(type.get());

  // h5py stores an empty fixed-length string as a null data space.
  if (type_class == H5T_STRING && H5Sget_simple_extent_type(space.get()) == H5S_NULL) {
    value = std::string();
    return {};
  }
  if (!is_one_element(space.get())) return "expected one value, found an array of values";

  const std::string failure = "cannot be read: ";
  switch (type_class) {
    case H5T_STRING: {
      const Handle memory(H5Tcopy(type.get()), H5Tclose);
      if (H5Tis_variable_str(type.get()) > 0) {
        char* text = nullptr;
        if (H5Aread(attribute, memory.get(), &text) < 0) return failure + hdf5::take_error();
        value = std::string(text == nullptr ? "" : text);
        hdf5::reclaim(memory.get(), space.get(), &text);
        return {};
      }
      const std::size_t length = H5Tget_size(type.get());
      if (length > longest_fixed_string) return "longer than any string this library reads";
      std::vector<char> bytes(length);
      if (H5Aread(attribute, memory.get(), bytes.data()) < 0) return failure + hdf5::take_error();
      value = fixed_string(bytes, H5Tget_strpad(type.get()));
      return {};
    }
    case H5T_INTEGER:
    case H5T_ENUM: {
      const Handle base = type_class == H5T_ENUM ? Handle(H5Tget_super(type.get()), H5Tclose)
                                                 : Handle(H5Tcopy(type.get()), H5Tclose);
      if (!base || H5Tget_size(base.get()) > 8) return "an integer wider than 64 bits";
      // An enumeration has no conversion to an integer, the integer behind it has.
      std::array<unsigned char, 8> bytes{};
      const bool is_unsigned = H5Tget_sign(base.get()) == H5T_SGN_NONE;
      if (H5Aread(attribute, type.get(), bytes.data()) < 0 ||
          H5Tconvert(base.get(), is_unsigned ? H5T_NATIVE_UINT64 : H5T_NATIVE_INT64, 1,
                     bytes.data(), nullptr, H5P_DEFAULT) < 0)
        return failure + hdf5::take_error();
      std::uint64_t bits = 0;
      std::memcpy(&bits, bytes.data(), sizeof bits);
      value = is_unsigned ? Value(bits) : Value(static_cast<std::int64_t>(bits));
      return {};
    }
    case H5T_FLOAT: {
      double number = 0.0;
      if (H5Aread(attribute, H5T_NATIVE_DOUBLE, &number) < 0) return failure + hdf5::take_error();
      value = number;
      return {};
    }
    default:
      return "expected a number or a string, found " + type_name(type.get());
  }
}

bool to_signed(const std::vector<hsize_t>& dimensions, std::vector<std::int64_t>& extents) {
  extents.clear();
  for (const hsize_t dimension : dimensions) {
    if (dimension > static_cast<hsize_t>(std::numeric_limits<std::int64_t>::max())) return false;
    extents.push_back(static_cast<std::int64_t>(dimension));
  }
  return true;
}

void swap_byte_pairs(std::byte* bytes, std::size_t size) {
  for (std::size_t i = 0; i + 1 < size; i += 2) std::swap(bytes[i], bytes[i + 1]);
}

}  // namespace

Handle half_type(H5T_order_t order) {
  Handle type(H5Tcopy(order == H5T_ORDER_BE ? H5T_IEEE_F32BE : H5T_IEEE_F32LE), H5Tclose);
  if (!type || H5Tset_fields(type.get(), 15, 10, 5, 0, 10) < 0 || H5Tset_size(type.get(), 2) < 0 ||
      H5Tset_ebias(type.get(), 15) < 0)
    return {};
  return type;
}

Handle native_type(ElementType type) {
  switch (type) {
    case ElementType::f64:
      return {H5Tcopy(H5T_NATIVE_DOUBLE), H5Tclose};
    case ElementType::f32:
      return {H5Tcopy(H5T_NATIVE_FLOAT), H5Tclose};
    case ElementType::f16:
      return half_type(H5Tget_order(H5T_NATIVE_FLOAT));
    case ElementType::u8:
      return {H5Tcopy(H5T_NATIVE_UINT8), H5Tclose};
    case ElementType::i64:
      return {H5Tcopy(H5T_NATIVE_INT64), H5Tclose};
  }
  return {};
}

void Reader::Impl::fail(const std::string& object, const std::string& text) const {
  throw InvalidArgument(hdf5::one_line(detail::message(file.string(), ": ", object, ": ", text)));
}

Handle Reader::Impl::find(const std::string& path) const {
  const Handle access = link_access();
  Handle here(H5Gopen2(handle.get(), "/", H5P_DEFAULT), H5Oclose);
  if (!here) fail("/", hdf5::take_error());
  std::string prefix;
  for (std::size_t from = 0; from < path.size();) {
    const std::size_t to = std::min(path.find('/', from), path.size());
    const std::string name = path.substr(from, to - from);
    from = to + 1;
    if (name.empty()) continue;
    if (H5Iget_type(here.get()) != H5I_GROUP)
      fail(prefix, detail::message("expected a group, found ", kind_name(H5Iget_type(here.get()))));
    prefix += "/" + name;
    const htri_t exists = H5Lexists(here.get(), name.c_str(), access.get());
    if (exists < 0) fail(prefix, hdf5::take_error());
    if (exists == 0) return {};
    H5L_info_t link{};
    if (H5Lget_info(here.get(), name.c_str(), &link, access.get()) < 0)
      fail(prefix, hdf5::take_error());
    if (link.type != H5L_TYPE_HARD && link.type != H5L_TYPE_SOFT)
      fail(prefix,
           "expected an object of this file, found an external link, which is not followed");
    Handle next(H5Oopen(here.get(), name.c_str(), access.get()), H5Oclose);
    if (!next) {
      const std::string reason = hdf5::take_error();
      fail(prefix,
           link.type == H5L_TYPE_SOFT
               ? "expected an object, found a soft link that leads nowhere in this file: " + reason
               : reason);
    }
    here = std::move(next);
  }
  return here;
}

Handle Reader::Impl::open(const std::string& path, const char* expected) const {
  Handle object = find(path);
  if (!object) fail(path, detail::message("expected ", expected, ", found nothing"));
  return object;
}

Reader::Reader(const std::filesystem::path& file, const ReadLimits& limits)
    : m_impl(std::make_unique<Impl>()) {
  const std::string name = file.string();
  if (name.empty()) throw InvalidArgument("expected the name of an HDF5 file, found an empty name");
  m_impl->file = file;
  m_impl->limits = limits;
  m_impl->limits.total_bytes = std::min(limits.total_bytes, memory_of_machine());
  const Session session;
  try {
    check_before_open(name);
    m_impl->handle = open_file(name);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(hdf5::one_line(error.what()));
  } catch (const EnvironmentFailure& error) {
    throw EnvironmentFailure(hdf5::one_line(error.what()));
  }
}

Reader::Reader(Reader&&) noexcept = default;

Reader& Reader::operator=(Reader&& other) noexcept {
  const Session session;
  m_impl = std::move(other.m_impl);
  return *this;
}

Reader::~Reader() {
  if (!m_impl) return;
  const Session session;
  m_impl.reset();
}

const std::filesystem::path& Reader::file() const noexcept { return m_impl->file; }

ObjectKind Reader::kind(const std::string& path) const {
  const Session session;
  const Handle object = m_impl->find(path);
  if (!object) return ObjectKind::absent;
  switch (H5Iget_type(object.get())) {
    case H5I_GROUP:
      return ObjectKind::group;
    case H5I_DATASET:
      return ObjectKind::dataset;
    default:
      return ObjectKind::other;
  }
}

std::vector<std::string> Reader::children(const std::string& group) const {
  const Session session;
  const Handle object = m_impl->open(group, "a group");
  if (const auto type = H5Iget_type(object.get()); type != H5I_GROUP)
    m_impl->fail(group, detail::message("expected a group, found ", kind_name(type)));
  H5G_info_t info{};
  if (H5Gget_info(object.get(), &info) < 0) m_impl->fail(group, hdf5::take_error());
  std::vector<std::string> names;
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    const auto get_name = [&](char* buffer, std::size_t size) {
      const ssize_t length = H5Lget_name_by_idx(object.get(), ".", H5_INDEX_NAME, H5_ITER_INC, i,
                                                buffer, size, H5P_DEFAULT);
      if (length < 0) m_impl->fail(group, hdf5::take_error());
      return static_cast<std::size_t>(length);
    };
    std::string name(get_name(nullptr, 0), '\0');
    get_name(name.data(), name.size() + 1);
    names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> Reader::attribute_names(const std::string& object) const {
  const Session session;
  const Handle handle = m_impl->open(object, "an object");
  std::vector<std::string> names;
  hsize_t position = 0;
  const herr_t status = H5Aiterate2(
      handle.get(), H5_INDEX_NAME, H5_ITER_INC, &position,
      [](hid_t, const char* name, const H5A_info_t*, void* data) -> herr_t {
        try {
          static_cast<std::vector<std::string>*>(data)->emplace_back(name);
          return 0;
        } catch (...) {
          return -1;
        }
      },
      &names);
  if (status < 0) m_impl->fail(object, hdf5::take_error());
  std::sort(names.begin(), names.end());
  return names;
}

Value Reader::attribute(const std::string& object, const std::string& name) const {
  const Session session;
  const Handle handle = m_impl->open(object, "an object");
  const std::string where = "attribute '" + name + "' of " + object;
  const htri_t exists = H5Aexists(handle.get(), name.c_str());
  if (exists == 0) m_impl->fail(where, "expected a value, found nothing");
  const Handle attribute(exists < 0 ? -1 : H5Aopen(handle.get(), name.c_str(), H5P_DEFAULT),
                         H5Aclose);
  if (!attribute) m_impl->fail(where, hdf5::take_error());
  Value value;
  if (const std::string problem = read_value(attribute.get(), value); !problem.empty())
    m_impl->fail(where, problem);
  return value;
}

DatasetInfo Reader::describe(const std::string& dataset) const {
  const Session session;
  const Handle handle = m_impl->open(dataset, "a dataset");
  if (const auto type = H5Iget_type(handle.get()); type != H5I_DATASET)
    m_impl->fail(dataset, detail::message("expected a dataset, found ", kind_name(type)));
  const Handle type(H5Dget_type(handle.get()), H5Tclose);
  const Handle space(H5Dget_space(handle.get()), H5Sclose);
  if (!type || !space) m_impl->fail(dataset, hdf5::take_error());

  DatasetInfo info;
  info.type = type_name(type.get());
  if (H5Tget_class(type.get()) == H5T_FLOAT) {
    info.element = ieee_type(type.get());
    info.exact = info.element.has_value();
  } else if (H5Tget_class(type.get()) == H5T_INTEGER && H5Tget_size(type.get()) <= 8) {
    info.element = info.type == "uint8" ? ElementType::u8 : ElementType::i64;
    info.exact = info.type == to_string(*info.element);
    if (info.type == "uint64") info.element.reset();
  }
  if (H5Sget_simple_extent_type(space.get()) == H5S_NULL)
    m_impl->fail(dataset, "expected elements, found a null data space");
  const int rank = H5Sget_simple_extent_ndims(space.get());
  std::vector<hsize_t> dimensions(static_cast<std::size_t>(std::max(rank, 0)));
  if (rank < 0 || H5Sget_simple_extent_dims(space.get(), dimensions.data(), nullptr) < 0)
    m_impl->fail(dataset, hdf5::take_error());
  if (!to_signed(dimensions, info.extents))
    m_impl->fail(dataset, "has an extent that does not fit 63 bits");
  return info;
}

Array Reader::read(const std::string& dataset) const {
  const Session session;
  const DatasetInfo info = describe(dataset);
  if (!info.element)
    m_impl->fail(dataset, "expected float16, float32, float64, uint8 or int64, found " + info.type);
  const std::string size = detail::message("extents ", to_string(info.extents), " of ", info.type);
  std::uint64_t elements = 0;
  try {
    elements = static_cast<std::uint64_t>(element_count(info.extents));
  } catch (const InvalidArgument&) {
    m_impl->fail(dataset, size + " are more elements than 63 bits can count");
  }

  Impl& impl = *m_impl;
  const std::uint64_t room =
      impl.limits.total_bytes - std::min(impl.limits.total_bytes, impl.bytes_read);
  const std::size_t element_bytes = size_of(*info.element);
  if (elements > room / element_bytes)
    impl.fail(dataset, detail::message(size, " exceed the limit of ", impl.limits.total_bytes,
                                       " bytes for one file"));

  const Handle handle = impl.open(dataset, "a dataset");
  const Handle creation(H5Dget_create_plist(handle.get()), H5Pclose);
  const Handle type(H5Dget_type(handle.get()), H5Tclose);
  if (!creation || !type) impl.fail(dataset, hdf5::take_error());
  const H5D_layout_t layout = H5Pget_layout(creation.get());
  if (layout == H5D_VIRTUAL || H5Pget_external_count(creation.get()) > 0)
    impl.fail(
        dataset,
        "expected data of this file, found a reference to other files, which is not followed");

  const std::uint64_t stored = H5Dget_storage_size(handle.get());
  const std::uint64_t bytes = elements * element_bytes;
  if (bytes > small_dataset_bytes && bytes / impl.limits.expansion > stored)
    impl.fail(dataset, detail::message(size, " need ", bytes, " bytes, the file stores ", stored,
                                       ", which is too little to be believed"));

  Array array;
  try {
    array = Array(*info.element, info.extents);
  } catch (const std::bad_alloc&) {
    throw EnvironmentFailure(hdf5::one_line(
        detail::message(impl.file.string(), ": ", dataset, ": no memory for ", bytes, " bytes")));
  }
  if (array.size() == 0) return array;

  // float16 travels as bits: HDF5's own conversion is slow and loses the payload of a NaN.
  const bool raw = *info.element == ElementType::f16;
  const Handle memory = raw ? Handle(H5Tcopy(type.get()), H5Tclose) : native_type(*info.element);
  if (!memory ||
      H5Dread(handle.get(), memory.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, array.data()) < 0)
    impl.fail(dataset, "cannot be read: " + hdf5::take_error());
  if (raw && H5Tget_order(type.get()) != H5Tget_order(H5T_NATIVE_FLOAT))
    swap_byte_pairs(array.data(), array.size_bytes());
  impl.bytes_read += bytes;
  return array;
}

}  // namespace LinAttn::io
