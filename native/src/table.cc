// The table of kernels of one instruction set.
#include "octavo/kernels.h"

namespace octavo::OCTAVO_SET {

void embed(const EmbedArgs&, Pool&);
void rms_norm(const RmsNormArgs&, Pool&);

extern const Kernels kernels;
const Kernels kernels = {
    .embed = embed,
    .rms_norm = rms_norm,
};

}  // namespace octavo::OCTAVO_SET
