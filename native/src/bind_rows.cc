// Bindings of packed weights and of the kernels that treat rows one by one.
#include <nanobind/stl/unique_ptr.h>

#include "bind.h"

namespace nb = nanobind;

namespace octavo {

namespace {

std::unique_ptr<Packed> pack(Backend& backend, const nb::list& matrices, bool gated) {
  Index rows = 0;
  Index columns = 0;
  for (const nb::handle matrix : matrices) {
    const Array part(matrix, "weight", BFLOAT16, 2, Access::read);
    if (rows != 0) part.expect(1, columns);
    if (rows != 0 && gated) part.expect(0, rows);
    rows += part.size(0);
    columns = part.size(1);
  }
  if (rows == 0 || columns == 0) throw nb::value_error("weight must have at least one element");
  auto packed = std::make_unique<Packed>(rows, columns, gated);
  Index first = 0;
  for (const nb::handle matrix : matrices) {
    const Array part(matrix, "weight", BFLOAT16, 2, Access::read);
    backend.run([&](const Kernels&, Pool& pool) {
      packed->write(part.as<const Bf16>(), first, part.size(0), pool);
    });
    first += part.size(0);
  }
  return packed;
}

void unpack(Backend& backend, const Packed& packed, nb::handle out) {
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

void argmax(Backend& backend, nb::handle logits, nb::handle out, nb::handle logprob) {
  const Array in(logits, "logits", FLOAT32, 2, Access::read);
  const Array tokens(out, "out", INT32, 1, Access::write);
  const Array logprobs(logprob, "logprob", FLOAT32, 1, Access::write);
  tokens.expect(0, in.size(0));
  logprobs.expect(0, in.size(0));
  const ArgmaxArgs args{in.as<const float>(), in.size(0), in.size(1), tokens.as<std::int32_t>(),
                        logprobs.as<float>()};
  if (args.vocabulary == 0) throw nb::value_error("logits must have at least one column");
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.argmax(args, pool); });
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
  backend.def("pack", &pack)
      .def("unpack", &unpack)
      .def("embed", &embed)
      .def("rms_norm", &rms_norm)
      .def("argmax", &argmax)
      .def("take_rows", &take_rows);
}

}  // namespace octavo
