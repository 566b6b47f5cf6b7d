#include "sharing.h"

#include <algorithm>
#include <cstring>

namespace octavo {

namespace {

struct Tables {
  const PagesView& pages;
  Index blocks;  // of a partition

  const std::int32_t* of(const Member& member) const {
    return pages.table + member.sequence * pages.table_width;
  }

  // Any order in which those that begin alike are neighbours.
  bool before(const Member& a, const Member& b) const {
    const Index both = std::min(a.whole, b.whole) * blocks;
    const int order =
        std::memcmp(of(a), of(b), static_cast<std::size_t>(both) * sizeof(std::int32_t));
    return order != 0 ? order < 0 : a.whole < b.whole;
  }

  Index alike(const Member& a, const Member& b) const {
    const std::int32_t *left = of(a), *right = of(b);
    const std::size_t bytes = static_cast<std::size_t>(blocks) * sizeof(std::int32_t);
    Index partition = 0;
    for (; partition < std::min(a.whole, b.whole); ++partition) {
      if (std::memcmp(left, right, bytes) != 0) break;
      left += blocks;
      right += blocks;
    }
    return partition;
  }
};

// Segments of members begin … end - 1, which are alike in `from` partitions; alike[i] is in how
// many member i is like the one before. A prefix of all is one segment, then come those of fewer.
void divide(Sharing& sharing, const Index* alike, Index begin, Index end, Index from) {
  if (end - begin < 2) return;
  const Index depth = *std::min_element(alike + begin + 1, alike + end);
  if (depth > from) {
    sharing.segments[sharing.segment_count++] = {begin, end, from, depth};
    for (Index i = begin; i < end; ++i) sharing.depth[sharing.members[i].sequence] = depth;
  }
  Index start = begin;
  for (Index i = begin + 1; i < end; ++i) {
    if (alike[i] != depth) continue;
    divide(sharing, alike, start, i, depth);
    start = i;
  }
  if (start > begin) divide(sharing, alike, start, end, depth);
}

}  // namespace

Sharing find_sharing(const AttentionArgs& args, Index partition, Index most, Pool& pool) {
  const BatchView& batch = args.batch;
  const std::size_t sequences = static_cast<std::size_t>(batch.sequences);
  char* memory = static_cast<char*>(
      pool.local(0, sequences * (sizeof(Member) + sizeof(Segment) + 2 * sizeof(Index))));
  Sharing sharing = {};
  sharing.members = reinterpret_cast<Member*>(memory);
  sharing.segments = reinterpret_cast<Segment*>(sharing.members + sequences);
  sharing.depth = reinterpret_cast<Index*>(sharing.segments + sequences);
  Index* const alike = sharing.depth + sequences;
  std::fill_n(sharing.depth, sequences, Index{0});
  if (args.window != 0 || partition % args.pages.block_size != 0) return sharing;

  Index item = 0;
  for (Index sequence = 0; sequence < batch.sequences; ++sequence) {
    const Index first = batch.query_start[sequence];
    const Index tokens = batch.query_start[sequence + 1] - first;
    const Index whole = tokens == 1 ? (batch.positions[first] + 1) / partition : 0;
    if (whole > 0) sharing.members[sharing.count++] = {sequence, item, whole};
    item += (tokens + most - 1) / most;
  }
  const Tables tables = {args.pages, partition / args.pages.block_size};
  std::sort(sharing.members, sharing.members + sharing.count,
            [&](const Member& a, const Member& b) { return tables.before(a, b); });
  for (Index i = 1; i < sharing.count; ++i) {
    alike[i] = tables.alike(sharing.members[i - 1], sharing.members[i]);
  }
  divide(sharing, alike, 0, sharing.count, 0);
  return sharing;
}

}  // namespace octavo
