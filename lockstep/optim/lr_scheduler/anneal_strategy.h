#pragma once

namespace lockstep::optim {

// How OneCycleLR and SWALR go from one rate to another: along half a cosine or
// along a line.
enum class AnnealStrategy { cos, linear };

}  // namespace lockstep::optim
