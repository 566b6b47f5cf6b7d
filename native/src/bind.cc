// octavo._native: the kernels as Python sees them. Types and shapes are checked here.
#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

namespace nb = nanobind;

namespace octavo {

namespace {

[[noreturn]] void raise_value(const std::string& message) {
  throw nb::value_error(message.c_str());
}

[[noreturn]] void raise_type(const std::string& message) { throw nb::type_error(message.c_str()); }

const char* dtype_of(char format) {
  if (format == FLOAT32) return "float32";
  if (format == INT32) return "int32";
  return format == BYTES ? "uint8" : "16-bit floats as uint16";
}

// Rows of whole elements, one after the other.
bool rows_are_contiguous(const Py_buffer& buffer) {
  if (buffer.shape[0] == 0 || buffer.shape[1] == 0) return true;
  const Py_ssize_t apart = buffer.strides[0], row = buffer.shape[1] * buffer.itemsize;
  const bool ordered = buffer.shape[0] == 1 || (apart >= row && apart % buffer.itemsize == 0);
  return ordered && (buffer.shape[1] == 1 || buffer.strides[1] == buffer.itemsize);
}

}  // namespace

Backend::Backend(int threads, const std::string& set) : choice_(choose_set(set)), pool_(threads) {}

Array::Array(nb::handle object, const char* name, char format, int axes, Access access)
    : name_(name) {
  const int layout = access == Access::write_rows ? PyBUF_STRIDES : PyBUF_ND;
  const int flags = PyBUF_FORMAT | layout | (access == Access::read ? 0 : PyBUF_WRITABLE);
  if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
    PyErr_Clear();
    const bool array = PyObject_CheckBuffer(object.ptr()) != 0;
    const std::string what = nb::cast<std::string>(nb::str(object.type().attr("__name__")));
    if (!array) raise_type(std::string(name) + " must be a numpy array, not " + what);
    raise_value(std::string(name) + " must be C-contiguous" +
                (access == Access::read ? "" : " and writable"));
  }
  const char* found = buffer_.format == nullptr ? "B" : buffer_.format;
  if (found[0] != format || found[1] != '\0') {
    const std::string message = std::string(name) + " must be " + dtype_of(format) +
                                ", its elements are of format '" + found + "'";
    PyBuffer_Release(&buffer_);
    raise_type(message);
  }
  if (buffer_.ndim != axes) {
    const std::string message = std::string(name) + " must have " + std::to_string(axes) +
                                " axes, it has " + std::to_string(buffer_.ndim);
    PyBuffer_Release(&buffer_);
    raise_value(message);
  }
  if (access == Access::write_rows && !rows_are_contiguous(buffer_)) {
    PyBuffer_Release(&buffer_);
    raise_value(std::string(name) + " must have contiguous rows");
  }
}

Array::~Array() { PyBuffer_Release(&buffer_); }

void Array::expect(int axis, Index expected) const {
  if (size(axis) == expected) return;
  raise_value(std::string(name_) + " must have size " + std::to_string(expected) + " on axis " +
              std::to_string(axis) + ", it has " + std::to_string(size(axis)));
}

void Array::expect_indices(Index below) const {
  const std::int32_t* const values = as<const std::int32_t>();
  for (Index i = 0; i < size(0); ++i) {
    if (values[i] >= 0 && values[i] < below) continue;
    raise_value(std::string(name_) + "[" + std::to_string(i) + "] must be in [0, " +
                std::to_string(below) + "), it is " + std::to_string(values[i]));
  }
}

}  // namespace octavo

NB_MODULE(_native, module) {
  using namespace octavo;
  module.def("available_sets", &available_sets,
             "The instruction sets this build has and this machine runs, the quickest first.");
  nb::class_<Backend> backend(module, "Backend");
  backend.def(nb::init<int, const std::string&>(), nb::arg("threads"), nb::arg("isa"))
      .def_prop_ro("isa", &Backend::set)
      .def_prop_ro("threads", &Backend::threads);
  bind_linear(backend);
  bind_rows(backend, module);
  bind_sampling(backend);
  bind_paging(backend);
  bind_ceilings(backend);
}
