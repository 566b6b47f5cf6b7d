// Bindings of the loops that show what the machine can do at most.
#include "bind.h"

namespace nb = nanobind;

namespace octavo {

namespace {

// Two blocks of two tiles: the least that a loop over tiles goes along.
constexpr Index LEAST_BYTES = 4096;

CeilingArgs ceiling_args(const Array& operands, const Array& out, Index rounds, int encoding) {
  if (operands.size(0) < LEAST_BYTES)
    throw nb::value_error("operands must be at least 4,096 bytes");
  return {
      .encoding = static_cast<Encoding>(encoding),
      .operands = operands.as<const unsigned char>(),
      .operand_bytes = operands.size(0),
      .rounds = rounds,
      .pieces = out.size(0),
      .out = out.as<float>(),
  };
}

double multiply(Backend& backend, nb::handle operands, Index rounds, int encoding, nb::handle out) {
  const Array from(operands, "operands", BYTES, 1, Access::read);
  const Array to(out, "out", FLOAT32, 1, Access::write);
  const CeilingArgs args = ceiling_args(from, to, rounds, encoding);
  double operations = 0.0;
  backend.run(
      [&](const Kernels& kernels, Pool& pool) { operations = kernels.multiply(args, pool); });
  return operations;
}

void read(Backend& backend, nb::handle operands, nb::handle out) {
  const Array from(operands, "operands", BYTES, 1, Access::read);
  const Array to(out, "out", FLOAT32, 1, Access::write);
  const CeilingArgs args = ceiling_args(from, to, 1, 0);
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.read(args, pool); });
}

}  // namespace

void bind_ceilings(nb::class_<Backend>& backend) {
  backend
      .def("multiply", &multiply, nb::arg("operands"), nb::arg("rounds"), nb::arg("encoding"),
           nb::arg("out"))
      .def("read", &read, nb::arg("operands"), nb::arg("out"));
}

}  // namespace octavo
