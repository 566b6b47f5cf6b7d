// Which sequences of a batch begin with the same blocks, so that attention reads those once.
#pragma once

#include "octavo/paging.h"

namespace octavo {

// The sequences that decode, those that begin alike side by side; `item` counts the chunks of
// `most` tokens before theirs: where they are in a list of items.
struct Member {
  Index sequence;
  Index item;
  Index whole;  // partitions that it sees whole
};

// Partitions first … last - 1 are the same for members begin … end - 1.
struct Segment {
  Index begin;
  Index end;
  Index first;
  Index last;
};

struct Sharing {
  Member* members;
  Index count;
  Segment* segments;
  Index segment_count;
  Index* depth;  // [S]: so many partitions of a sequence are in segments
};

// Looks at runs of `partition` positions. Nothing is shared behind a window. The memory is that of
// thread 0, until its next use.
Sharing find_sharing(const AttentionArgs& args, Index partition, Index most, Pool& pool);

}  // namespace octavo
