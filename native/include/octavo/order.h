// The order in which the weights of a model are read, learned as they are.
#pragma once

#include <unordered_map>

#include "octavo/pool.h"

namespace octavo {

// A model reads its weights in the same order step after step: what followed the last time is
// announced, so that threads without work fetch it.
class ReadingOrder {
 public:
  // `weight` is about to be read.
  void read(Stretch weight, Pool& pool) {
    if (last_ != nullptr) after_[last_] = weight;
    last_ = weight.bytes;
    Stretch next[Pool::STRETCHES];
    int count = 0;
    std::size_t left = MOST;
    for (auto found = after_.find(last_); found != after_.end() && count < Pool::STRETCHES;
         found = after_.find(next[count++].bytes)) {
      next[count] = found->second;
      if (next[count].size > left) next[count].size = left;
      left -= next[count].size;
    }
    pool.announce(next, count);
  }

 private:
  // More than is fetched between two ops of a step, little beside what the cores share of cache.
  static constexpr std::size_t MOST = std::size_t{2} << 20;

  std::unordered_map<const unsigned char*, Stretch> after_;
  const unsigned char* last_ = nullptr;
};

}  // namespace octavo
