// Bindings of what happens to rows of logits, up to the token drawn from each.
#include "bind.h"

namespace nb = nanobind;

namespace octavo {

namespace {

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

// How to draw: temperature float32, top_k int32, top_p float64, min_p float32, point float64,
// top_n_sigma float32, typical_p float64, xtc_threshold float64 [D].
struct DrawArrays {
  DrawArrays(nb::handle how, Index draws)
      : temperature(how[nb::int_(0)], "temperature", FLOAT32, 1, Access::read),
        top_k(how[nb::int_(1)], "top_k", INT32, 1, Access::read),
        top_p(how[nb::int_(2)], "top_p", FLOAT64, 1, Access::read),
        min_p(how[nb::int_(3)], "min_p", FLOAT32, 1, Access::read),
        point(how[nb::int_(4)], "point", FLOAT64, 1, Access::read),
        top_n_sigma(how[nb::int_(5)], "top_n_sigma", FLOAT32, 1, Access::read),
        typical_p(how[nb::int_(6)], "typical_p", FLOAT64, 1, Access::read),
        xtc_threshold(how[nb::int_(7)], "xtc_threshold", FLOAT64, 1, Access::read) {
    for (const Array* array :
         {&temperature, &top_k, &top_p, &min_p, &point, &top_n_sigma, &typical_p, &xtc_threshold}) {
      array->expect(0, draws);
    }
  }

  Array temperature;
  Array top_k;
  Array top_p;
  Array min_p;
  Array point;
  Array top_n_sigma;
  Array typical_p;
  Array xtc_threshold;
};

void draw(Backend& backend, nb::handle logits, nb::handle rows, nb::handle how, nb::handle out) {
  const Array in(logits, "logits", FLOAT32, 2, Access::read);
  const Array chosen(rows, "rows", INT32, 1, Access::read);
  const Array tokens(out, "out", INT32, 1, Access::write);
  const DrawArrays arrays(how, chosen.size(0));
  tokens.expect(0, chosen.size(0));
  chosen.expect_indices(in.size(0));
  if (in.size(1) == 0) throw nb::value_error("logits must have at least one column");
  const DrawArgs args{in.as<const float>(),
                      in.size(1),
                      chosen.as<const std::int32_t>(),
                      chosen.size(0),
                      arrays.temperature.as<const float>(),
                      arrays.top_k.as<const std::int32_t>(),
                      arrays.top_p.as<const double>(),
                      arrays.min_p.as<const float>(),
                      arrays.point.as<const double>(),
                      arrays.top_n_sigma.as<const float>(),
                      arrays.typical_p.as<const double>(),
                      arrays.xtc_threshold.as<const double>(),
                      tokens.as<std::int32_t>()};
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.draw(args, pool); });
}

// Some tokens of each of E rows: rows int32 [E], start int32 [E + 1], ids int32 [N].
struct EntryArrays {
  EntryArrays(nb::handle rows_of, nb::handle entries, nb::handle kept)
      : logits(rows_of, "logits", FLOAT32, 2, Access::write),
        rows(entries[nb::int_(0)], "rows", INT32, 1, Access::read),
        start(entries[nb::int_(1)], "start", INT32, 1, Access::read),
        ids(entries[nb::int_(2)], "ids", INT32, 1, Access::read),
        before(kept, "before", FLOAT32, 1, Access::write) {
    rows.expect_indices(logits.size(0));
    ids.expect_indices(logits.size(1));
    before.expect(0, ids.size(0));
    start.expect(0, rows.size(0) + 1);
    const std::int32_t* const bounds = start.as<const std::int32_t>();
    bool rising = bounds[0] == 0 && bounds[rows.size(0)] == ids.size(0);
    for (Index n = 0; n < rows.size(0); ++n) rising = rising && bounds[n] <= bounds[n + 1];
    if (!rising) throw nb::value_error("start must rise from 0 to the number of ids");
  }

  EntryArgs args() const {
    return {logits.as<float>(),
            logits.size(1),
            rows.as<const std::int32_t>(),
            rows.size(0),
            start.as<const std::int32_t>(),
            ids.as<const std::int32_t>(),
            before.as<float>()};
  }

  Array logits;
  Array rows;
  Array start;
  Array ids;
  Array before;
};

void add_bias(Backend& backend, nb::handle logits, nb::handle entries, nb::handle bias,
              nb::handle before) {
  const EntryArrays arrays(logits, entries, before);
  const Array values(bias, "bias", FLOAT32, 1, Access::read);
  values.expect(0, arrays.ids.size(0));
  const BiasArgs args{arrays.args(), values.as<const float>()};
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.add_bias(args, pool); });
}

void penalise(Backend& backend, nb::handle logits, nb::handle entries, nb::handle penalties,
              nb::handle before) {
  const EntryArrays arrays(logits, entries, before);
  const Array counts(penalties[nb::int_(0)], "counts", INT32, 1, Access::read);
  const Array repetition(penalties[nb::int_(1)], "repetition", FLOAT32, 1, Access::read);
  const Array presence(penalties[nb::int_(2)], "presence", FLOAT32, 1, Access::read);
  const Array frequency(penalties[nb::int_(3)], "frequency", FLOAT32, 1, Access::read);
  counts.expect(0, arrays.ids.size(0));
  for (const Array* array : {&repetition, &presence, &frequency}) {
    array->expect(0, arrays.rows.size(0));
  }
  const PenaltyArgs args{arrays.args(), counts.as<const std::int32_t>(),
                         repetition.as<const float>(), presence.as<const float>(),
                         frequency.as<const float>()};
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.penalise(args, pool); });
}

void mask(Backend& backend, nb::handle logits, nb::handle rows, nb::handle allowed) {
  constexpr Index WORD = 32;
  const Array in(logits, "logits", FLOAT32, 2, Access::write);
  const Array chosen(rows, "rows", INT32, 1, Access::read);
  const Array bits(allowed, "allowed", INT32, 2, Access::read);
  chosen.expect_indices(in.size(0));
  bits.expect(0, chosen.size(0));
  bits.expect(1, (in.size(1) + WORD - 1) / WORD);
  const MaskArgs args{in.as<float>(),
                      in.size(1),
                      chosen.as<const std::int32_t>(),
                      chosen.size(0),
                      bits.as<const std::int32_t>(),
                      bits.size(1)};
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.mask(args, pool); });
}

void likeliest(Backend& backend, nb::handle logits, nb::handle rows, nb::handle ids,
               nb::handle values) {
  const Array in(logits, "logits", FLOAT32, 2, Access::read);
  const Array chosen(rows, "rows", INT32, 1, Access::read);
  const Array to(ids, "ids", INT32, 2, Access::write);
  const Array found(values, "values", FLOAT32, 2, Access::write);
  chosen.expect_indices(in.size(0));
  for (const Array* array : {&to, &found}) {
    array->expect(0, chosen.size(0));
    array->expect(1, to.size(1));
  }
  const Index wanted = to.size(1);
  if (wanted < 1 || wanted > in.size(1)) {
    throw nb::value_error("ids must have 1 to as many columns as logits has");
  }
  const LikeliestArgs args{in.as<const float>(), in.size(1), chosen.as<const std::int32_t>(),
                           chosen.size(0),       wanted,     to.as<std::int32_t>(),
                           found.as<float>()};
  backend.run([&](const Kernels& kernels, Pool& pool) { kernels.likeliest(args, pool); });
}

}  // namespace

void bind_sampling(nb::class_<Backend>& backend) {
  backend.def("argmax", &argmax)
      .def("likeliest", &likeliest)
      .def("add_bias", &add_bias)
      .def("penalise", &penalise)
      .def("mask", &mask)
      .def("draw", &draw);
}

}  // namespace octavo
