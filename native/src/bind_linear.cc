// Binding of `linear`.
#include <optional>

#include "bind.h"

namespace nb = nanobind;

namespace octavo {

namespace {

// A vector of `size` float32, or null for None.
const float* vector_or_null(std::optional<Array>& array, nb::handle object, const char* name,
                            Index size) {
  if (object.is_none()) return nullptr;
  array.emplace(object, name, FLOAT32, 1, Access::read);
  array->expect(0, size);
  return array->as<const float>();
}

void linear(Backend& backend, nb::handle x, const Packed& weight, nb::handle out,
            nb::handle norm_weight, float eps, nb::handle bias, bool add, int gate) {
  const PackedView view = weight.view();
  if (view.gated != (gate != 0)) {
    throw nb::value_error(view.gated ? "weight is a gated pair: gated must name an activation"
                                     : "weight is no gated pair: gated must be None");
  }
  const Array in(x, "x", FLOAT32, 2, Access::read);
  const Array to(out, "out", FLOAT32, 2, Access::write_rows);
  in.expect(1, view.columns);
  to.expect(0, in.size(0));
  to.expect(1, view.gated ? view.rows / 2 : view.rows);
  std::optional<Array> norm, offset;
  const LinearArgs args{
      .x = in.as<const float>(),
      .rows = in.size(0),
      .weight = view,
      .norm = {vector_or_null(norm, norm_weight, "norm.weight", view.columns), eps},
      .bias = vector_or_null(offset, bias, "bias", view.rows),
      .add = add,
      .gate = static_cast<Gate>(gate),
      .out = to.as<float>(),
      .out_stride = to.row_stride(),
  };
  const Stretch all{view.panels, weight.bytes()};
  backend.run([&](const Kernels& kernels, Pool& pool) {
    backend.order().read(all, pool);
    kernels.linear(args, pool);
  });
}

}  // namespace

void bind_linear(nb::class_<Backend>& backend) {
  backend.def("linear", &linear, nb::arg("x"), nb::arg("weight"), nb::arg("out"),
              nb::arg("norm_weight").none(), nb::arg("eps"), nb::arg("bias").none(), nb::arg("add"),
              nb::arg("gate"));
}

}  // namespace octavo
