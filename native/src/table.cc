// The table of kernels of one instruction set.
#include "octavo/kernels.h"

namespace octavo::OCTAVO_SET {

void embed(const EmbedArgs&, Pool&);
void linear(const LinearArgs&, Pool&);
void rms_norm(const RmsNormArgs&, Pool&);
void argmax(const ArgmaxArgs&, Pool&);
void likeliest(const LikeliestArgs&, Pool&);
void add_bias(const BiasArgs&, Pool&);
void penalise(const PenaltyArgs&, Pool&);
void mask(const MaskArgs&, Pool&);
void draw(const DrawArgs&, Pool&);
void rope_write_kv(const RopeArgs&, Pool&);
void paged_attention(const AttentionArgs&, Pool&);
double multiply(const CeilingArgs&, Pool&);
void read(const CeilingArgs&, Pool&);

extern const Kernels kernels;
const Kernels kernels = {
    .embed = embed,
    .linear = linear,
    .rms_norm = rms_norm,
    .argmax = argmax,
    .likeliest = likeliest,
    .add_bias = add_bias,
    .penalise = penalise,
    .mask = mask,
    .draw = draw,
    .rope_write_kv = rope_write_kv,
    .paged_attention = paged_attention,
    .multiply = multiply,
    .read = read,
};

}  // namespace octavo::OCTAVO_SET
