// Bindings of packed weights and of the kernels that treat rows one by one.
#include <nanobind/stl/unique_ptr.h>

#include <optional>

#include "bind.h"
#include "octavo/encoded.h"

namespace nb = nanobind;

namespace octavo {

namespace {

// Adds up the rows of matrices that are stacked. A gated pair has as many of each.
class Stack {
 public:
  explicit Stack(bool gated) : gated_(gated) {}

  void add(const Array& part, Index columns) {
    if (rows_ != 0 && gated_) part.expect(0, rows_);
    rows_ += part.size(0);
    columns_ = columns;
  }

  std::unique_ptr<Packed> packed(Encoding encoding, Arena& arena) const {
    if (rows_ == 0 || columns_ == 0) throw nb::value_error("weight must have at least one element");
    return std::make_unique<Packed>(rows_, columns_, gated_, encoding, arena);
  }

 private:
  bool gated_;
  Index rows_ = 0;
  Index columns_ = 0;
};

// One matrix as a checkpoint encodes it: the number of its kind, and its bytes uint8 [N, row
// bytes].
struct EncodedArray {
  EncodedArray(nb::handle part, Index columns)
      : kind(checked(nb::cast<int>(part[nb::int_(0)]))),
        bytes(part[nb::int_(1)], "weight", BYTES, 2, Access::read) {
    const BlockShape shape = block_shape(kind);
    if (columns % shape.elements != 0) throw nb::value_error("columns must be whole blocks");
    bytes.expect(1, columns / shape.elements * shape.bytes);
  }

  EncodedRows rows() const { return {kind, bytes.as<const unsigned char>(), bytes.size(1)}; }

  static Kind checked(int number) {
    if (number < 0 || number >= KINDS) throw nb::value_error("no kind has that number");
    return static_cast<Kind>(number);
  }

  Kind kind;
  Array bytes;
};

// `done`, unless None, is called with the number of each matrix that has been read. Returns also
// the first matrix that holds elements that are not finite, or -1.
nb::tuple pack(Backend& backend, const nb::list& matrices, Index columns, int encoding, bool gated,
               nb::object done) {
  const Encoding target = static_cast<Encoding>(encoding);
  Stack stack(gated);
  for (const nb::handle matrix : matrices) {
    const EncodedArray part(matrix, columns);
    if (!packs_as(part.kind, target)) throw nb::value_error("the matrix stores no such integers");
    stack.add(part.bytes, columns);
  }
  auto packed = stack.packed(target, backend.arena());
  Index first = 0, number = 0, faulty = -1;
  for (const nb::handle matrix : matrices) {
    const EncodedArray part(matrix, columns);
    bool finite = true;
    backend.run([&](const Kernels&, Pool& pool) {
      finite = packed->write(part.rows(), first, part.bytes.size(0), pool);
    });
    if (!finite && faulty < 0) faulty = number;
    if (!done.is_none()) done(number);
    first += part.bytes.size(0);
    ++number;
  }
  return nb::make_tuple(std::move(packed), faulty);
}

// The arrays of one quantised matrix: values uint8 [N, bytes], scales and offsets float16 as uint16
// [N, groups], multiples int8 as uint8 [N, 2 groups]. Offsets and multiples are None unless the
// encoding has them.
struct QuantisedArrays {
  QuantisedArrays(nb::handle part, Index columns, Encoding encoding)
      : values(part[nb::int_(0)], "values", BYTES, 2, Access::read),
        scales(part[nb::int_(1)], "scales", FLOAT16, 2, Access::read) {
    const Index groups = (columns + DEPTH - 1) / DEPTH;
    values.expect(1, groups * (DEPTH / 8) * bits_of(encoding));
    scales.expect(0, values.size(0));
    scales.expect(1, groups);
    if (has_offsets(encoding)) take(offsets, part[nb::int_(2)], "offsets", FLOAT16, groups);
    if (has_multiples(encoding)) take(multiples, part[nb::int_(3)], "multiples", BYTES, 2 * groups);
  }

  void take(std::optional<Array>& array, nb::handle from, const char* name, char format,
            Index columns) {
    array.emplace(from, name, format, 2, Access::read);
    array->expect(0, values.size(0));
    array->expect(1, columns);
  }

  QuantisedRows rows() const {
    return {values.as<const unsigned char>(), scales.as<const Half>(),
            offsets.has_value() ? offsets->as<const Half>() : nullptr,
            multiples.has_value() ? multiples->as<const signed char>() : nullptr};
  }

  Array values;
  Array scales;
  std::optional<Array> offsets;
  std::optional<Array> multiples;
};

std::unique_ptr<Packed> pack_quantised(Backend& backend, const nb::list& matrices, Index columns,
                                       int encoding, bool gated) {
  const Encoding kind = static_cast<Encoding>(encoding);
  Stack stack(gated);
  for (const nb::handle matrix : matrices) {
    stack.add(QuantisedArrays(matrix, columns, kind).values, columns);
  }
  auto packed = stack.packed(kind, backend.arena());
  Index first = 0;
  for (const nb::handle matrix : matrices) {
    const QuantisedArrays part(matrix, columns, kind);
    backend.run([&](const Kernels&, Pool& pool) {
      packed->write(part.rows(), first, part.values.size(0), pool);
    });
    first += part.values.size(0);
  }
  return packed;
}

void unpack(Backend& backend, const Packed& packed, nb::handle out) {
  if (packed.view().encoding != Encoding::bf16) throw nb::value_error("weight must be bfloat16");
  const Array to(out, "out", BFLOAT16, 2, Access::write);
  to.expect(0, packed.view().rows);
  to.expect(1, packed.view().columns);
  backend.run([&](const Kernels&, Pool& pool) { packed.read(to.as<Bf16>(), pool); });
}

void embed(Backend& backend, const Packed& table, nb::handle tokens, nb::handle out) {
  const Array rows(tokens, "tokens", INT32, 1, Access::read);
  const Array to(out, "out", FLOAT32, 2, Access::write);
  to.expect(0, rows.size(0));
  to.expect(1, table.view().columns);
  if (table.view().gated) throw nb::value_error("table must not be a gated pair");
  rows.expect_indices(table.view().rows);
  const EmbedArgs args{table.view(), rows.as<const std::int32_t>(), rows.size(0), to.as<float>()};
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.embed(args, pool); });
}

void rms_norm(Backend& backend, nb::handle x, nb::handle weight, float eps, nb::handle out) {
  const Array in(x, "x", FLOAT32, 2, Access::read);
  const Array scale(weight, "norm.weight", FLOAT32, 1, Access::read);
  const Array to(out, "out", FLOAT32, 2, Access::write);
  scale.expect(0, in.size(1));
  to.expect(0, in.size(0));
  to.expect(1, in.size(1));
  const RmsNormArgs args{
      in.as<const float>(), in.size(0), in.size(1), {scale.as<const float>(), eps}, to.as<float>()};
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.rms_norm(args, pool); });
}

void take_rows(Backend& backend, nb::handle x, nb::handle rows, nb::handle out) {
  const Array in(x, "x", FLOAT32, 2, Access::read);
  const Array chosen(rows, "rows", INT32, 1, Access::read);
  const Array to(out, "out", FLOAT32, 2, Access::write);
  to.expect(0, chosen.size(0));
  to.expect(1, in.size(1));
  chosen.expect_indices(in.size(0));
  const std::size_t width = static_cast<std::size_t>(in.size(1));
  const std::int32_t* const row = chosen.as<const std::int32_t>();
  backend.run([&](const Kernels&, Pool&) {
    for (Index r = 0; r < chosen.size(0); ++r) {
      std::memcpy(to.as<float>() + static_cast<std::size_t>(r) * width,
                  in.as<const float>() + static_cast<std::size_t>(row[r]) * width,
                  width * sizeof(float));
    }
  });
}

}  // namespace

void bind_rows(nb::class_<Backend>& backend, nb::module_& module) {
  nb::class_<Packed>(module, "Packed")
      .def_prop_ro("rows", [](const Packed& packed) { return packed.view().rows; })
      .def_prop_ro("columns", [](const Packed& packed) { return packed.view().columns; })
      .def_prop_ro("gated", [](const Packed& packed) { return packed.view().gated; })
      .def_prop_ro("nbytes", &Packed::bytes);
  backend
      .def("pack", &pack, nb::arg("matrices"), nb::arg("columns"), nb::arg("encoding"),
           nb::arg("gated"), nb::arg("done").none())
      .def("pack_quantised", &pack_quantised)
      .def("unpack", &unpack)
      .def("embed", &embed)
      .def("rms_norm", &rms_norm)
      .def("take_rows", &take_rows);
}

}  // namespace octavo
