// Bindings of the kernels that read and write pages.
#include <stdexcept>

#include "bind.h"

namespace nb = nanobind;

namespace octavo {

namespace {

constexpr Index SCALE_BYTES = 4;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

// The message is made only when it is needed: these checks run in every layer.
void require(bool holds, const char* message) {
  if (!holds) refuse(message);
}

// A pool of bytes is one of int8 with scales.
KvType type_of(nb::handle pool) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(pool.ptr(), &buffer, PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return KvType::bf16;
  }
  const bool bytes = buffer.format == nullptr || buffer.format[0] == BYTES;
  PyBuffer_Release(&buffer);
  return bytes ? KvType::int8 : KvType::bf16;
}

char format_of(KvType type) { return type == KvType::bf16 ? BFLOAT16 : BYTES; }

// The arrays of a step and of a layer's pages, checked against each other. Of the tables only those
// entries are followed that a row can see which sees the last `window` positions (0: all).
class Step {
 public:
  Step(nb::handle rows, nb::tuple batch_arrays, nb::handle pages_array, Index layer,
       nb::handle block_table, Index window, Access rows_access, Access pages_access)
      : qkv(rows, "qkv", FLOAT32, 2, rows_access),
        positions(batch_arrays[0], "batch.positions", INT32, 1, Access::read),
        query_start(batch_arrays[1], "batch.query_start", INT32, 1, Access::read),
        context(batch_arrays[2], "batch.context", INT32, 1, Access::read),
        type(type_of(pages_array)),
        pool(pages_array, "kv.pool", format_of(type), 6, pages_access),
        table(block_table, "kv.table", INT32, 2, Access::read),
        window_(window) {
    const Index layers = pool.size(1), tiles = pool.size(4);
    kv_heads = pool.size(3);
    const bool scaled = type == KvType::int8;
    head_dim = pool.size(5) / PANEL - (scaled ? SCALE_BYTES : 0);
    block_size = tiles * PANEL;
    pool.expect(2, 2);
    require(
        kv_heads > 0 && tiles > 0 && head_dim > 0 && head_dim % 2 == 0 && pool.size(5) % PANEL == 0,
        scaled
            ? "kv.pool of uint8 must be [blocks, layers, 2, Hk, B / 16, 16 (4 + E)] with an even E"
            : "kv.pool must be [blocks, layers, 2, Hk, B / 16, 16 E] with an even E");
    if (layer < 0 || layer >= layers) {
      refuse("kv.layer must be less than the pool's " + std::to_string(layers) + " layers, it is " +
             std::to_string(layer));
    }
    const Index page_bytes = 2 * kv_heads * tiles * pool.size(5) * (scaled ? 1 : sizeof(Bf16));
    page = layer * page_bytes;
    block_stride = layers * page_bytes;
    heads = qkv.size(1) / head_dim - 2 * kv_heads;
    if (qkv.size(1) % head_dim != 0 || heads <= 0 || heads % kv_heads != 0) {
      refuse("qkv is " + std::to_string(qkv.size(1)) +
             " wide, which is not (Hq + 2 Hk) E with Hq a multiple of Hk");
    }
    check_rows();
  }

  BatchView batch() const {
    return {positions.as<const std::int32_t>(), query_start.as<const std::int32_t>(),
            context.as<const std::int32_t>(), context.size(0), qkv.size(0)};
  }

  PagesView pages() const {
    return {type,       pool.as<unsigned char>() + page, block_stride, kv_heads, head_dim,
            block_size, table.as<const std::int32_t>(),  table.size(1)};
  }

  const Array qkv, positions, query_start, context;
  const KvType type;
  const Array pool, table;
  Index heads, kv_heads, head_dim, block_size, page, block_stride;

 private:
  // Every index that a kernel follows stays inside the arrays.
  void check_rows() const {
    const Index rows = qkv.size(0), sequences = context.size(0);
    positions.expect(0, rows);
    query_start.expect(0, sequences + 1);
    table.expect(0, sequences);
    const BatchView view = batch();
    require(view.query_start[0] == 0 && view.query_start[sequences] == rows,
            "batch.query_start must begin with 0 and end with the number of rows");
    for (Index sequence = 0; sequence < sequences; ++sequence) check_sequence(view, sequence);
  }

  void check_sequence(const BatchView& view, Index sequence) const {
    const Index start = view.query_start[sequence], stop = view.query_start[sequence + 1];
    const Index length = view.context[sequence];
    require(start <= stop && stop <= view.rows, "batch.query_start must ascend");
    require(stop - start <= length, "batch.context is less than the rows of its sequence");
    for (Index row = start; row < stop; ++row) {
      require(view.positions[row] == length - stop + row,
              "batch.positions must be consecutive and end at context - 1");
    }
    if (start == stop) return;
    const Index used = (length + block_size - 1) / block_size;
    const Index oldest = length - (stop - start);  // the position of the first row
    const Index first = window_ == 0 || window_ > oldest ? 0 : oldest + 1 - window_;
    if (used > table.size(1)) {
      refuse("kv.table has no room for a context of " + std::to_string(length) + " positions");
    }
    const std::int32_t* blocks = table.as<const std::int32_t>() + sequence * table.size(1);
    const std::uint32_t limit = static_cast<std::uint32_t>(pool.size(0));
    bool inside = true;
    for (Index i = first / block_size; i < used; ++i)
      inside &= static_cast<std::uint32_t>(blocks[i]) < limit;
    require(inside, "kv.table names a block outside the pool");
  }

  const Index window_;
};

void rope_write_kv(Backend& backend, nb::handle qkv, nb::tuple batch, nb::handle cos,
                   nb::handle sin, nb::handle pool, Index layer, nb::handle table) {
  const Step step(qkv, batch, pool, layer, table, 1, Access::write, Access::write);
  RopeArgs args{step.qkv.as<float>(), step.heads, nullptr, nullptr, 0, step.batch(), step.pages()};
  const auto write = [&] {
    backend.run(
        [&](const Kernels& kernels, Pool& threads) { kernels.rope_write_kv(args, threads); });
  };
  if (cos.is_none()) return write();
  const Array cosines(cos, "rope.cos", FLOAT32, 2, Access::read);
  const Array sines(sin, "rope.sin", FLOAT32, 2, Access::read);
  sines.expect(0, cosines.size(0));
  sines.expect(1, cosines.size(1));
  require(2 * cosines.size(1) <= step.head_dim, "rope turns more elements than a head has");
  for (Index sequence = 0; sequence < args.batch.sequences; ++sequence) {
    const Index length = args.batch.context[sequence];
    if (length > cosines.size(0)) {
      refuse("rope has tables for " + std::to_string(cosines.size(0)) + " positions, not for " +
             std::to_string(length));
    }
  }
  args.cos = cosines.as<const float>();
  args.sin = sines.as<const float>();
  args.pairs = cosines.size(1);
  write();
}

void paged_attention(Backend& backend, nb::handle qkv, nb::tuple batch, nb::handle pool,
                     Index layer, nb::handle table, nb::handle out, float scale, Index window) {
  if (window < 0) {
    refuse("window must be at least 1, or 0 for none, it is " + std::to_string(window));
  }
  const Step step(qkv, batch, pool, layer, table, window, Access::read, Access::read);
  const Array to(out, "out", FLOAT32, 2, Access::write);
  to.expect(0, step.qkv.size(0));
  to.expect(1, step.heads * step.head_dim);
  if (!(scale > 0)) refuse("scale must be positive, it is " + std::to_string(scale));
  const AttentionArgs args{step.qkv.as<const float>(),
                           step.heads,
                           scale,
                           window,
                           step.batch(),
                           step.pages(),
                           to.as<float>()};
  backend.run(
      [&](const Kernels& kernels, Pool& threads) { kernels.paged_attention(args, threads); });
}

void copy_whole_blocks(Backend& backend, nb::handle pool, nb::handle sources, nb::handle targets) {
  const KvType type = type_of(pool);
  const Array blocks(pool, "pool", format_of(type), 6, Access::write);
  const Array from(sources, "sources", INT32, 1, Access::read);
  const Array to(targets, "targets", INT32, 1, Access::read);
  to.expect(0, from.size(0));
  Index block_bytes = type == KvType::bf16 ? sizeof(Bf16) : 1;
  for (int axis = 1; axis < 6; ++axis) block_bytes *= blocks.size(axis);
  const CopyArgs args{blocks.as<unsigned char>(), block_bytes, from.as<const std::int32_t>(),
                      to.as<const std::int32_t>(), from.size(0)};
  for (Index i = 0; i < args.copies; ++i) {
    const auto inside = [&](std::int32_t block) { return block >= 0 && block < blocks.size(0); };
    require(inside(args.sources[i]) && inside(args.targets[i]),
            "a copy names a block outside the pool");
  }
  backend.run([&](const Kernels&, Pool& threads) { copy_blocks(args, threads); });
}

}  // namespace

void bind_paging(nb::class_<Backend>& backend) {
  backend.def("rope_write_kv", &rope_write_kv, nb::arg(), nb::arg(), nb::arg().none(),
              nb::arg().none(), nb::arg(), nb::arg(), nb::arg());
  backend.def("paged_attention", &paged_attention);
  backend.def("copy_blocks", &copy_whole_blocks);
}

}  // namespace octavo
