// What the bindings share: the backend that Python holds, and checked views of its arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "octavo/arena.h"
#include "octavo/dispatch.h"
#include "octavo/kernels.h"
#include "octavo/order.h"
#include "octavo/pool.h"

namespace octavo {

// One instruction set and one pool of threads. Calls from several Python threads take turns.
class Backend {
 public:
  Backend(int threads, const std::string& set);

  const std::string& set() const { return choice_.name; }
  int threads() const { return pool_.threads(); }

  // Runs work(kernels, pool) without the interpreter lock.
  template <typename Work>
  void run(Work&& work) {
    nanobind::gil_scoped_release released;
    std::lock_guard<std::mutex> turn(turn_);
    work(*choice_.kernels, pool_);
  }

  // For those who have the turn.
  ReadingOrder& order() { return order_; }

  // For those who have the interpreter lock.
  Arena& arena() { return arena_; }

 private:
  Choice choice_;
  Pool pool_;
  ReadingOrder order_;
  Arena arena_;
  std::mutex turn_;
};

enum class Access { read, write, write_rows };  // rows may lie apart

// A C-contiguous numpy array, or one whose rows are, held for the length of a call. 0.1 µs, where
// DLPack takes 7.
//
// Throws TypeError if the object is no array or has another dtype, ValueError if it is not
// contiguous, not writable or has another number of axes; `name` is that of the argument.
class Array {
 public:
  Array(nanobind::handle object, const char* name, char format, int axes, Access access);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  Index size(int axis) const { return buffer_.shape[axis]; }

  // Elements from a row to the next, of an array with two axes.
  Index row_stride() const {
    return buffer_.strides == nullptr ? size(1) : buffer_.strides[0] / buffer_.itemsize;
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(buffer_.buf);
  }

  // Throws ValueError unless axis `axis` has `expected` elements.
  void expect(int axis, Index expected) const;

  // Throws ValueError unless every int32 is in [0, below).
  void expect_indices(Index below) const;

 private:
  Py_buffer buffer_;
  const char* name_;
};

// Formats of array elements, as the buffer protocol names them. numpy has no bfloat16: such arrays,
// and float16 as they, come as views of uint16.
constexpr char FLOAT32 = 'f';
constexpr char FLOAT64 = 'd';
constexpr char INT32 = 'i';
constexpr char BFLOAT16 = 'H';
constexpr char FLOAT16 = 'H';
constexpr char BYTES = 'B';

void bind_linear(nanobind::class_<Backend>& backend);
void bind_rows(nanobind::class_<Backend>& backend, nanobind::module_& module);
void bind_sampling(nanobind::class_<Backend>& backend);
void bind_paging(nanobind::class_<Backend>& backend);
void bind_ceilings(nanobind::class_<Backend>& backend);

}  // namespace octavo
