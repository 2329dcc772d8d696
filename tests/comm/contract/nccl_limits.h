#pragma once

#include <map>
#include <string>

namespace lockstep::internal::testing {

// Returns the cases of the contract that c10d's NCCL backend cannot pass
// (ContractBackend::cannot).
inline std::map<std::string, std::string> nccl_limits() {
  const std::string source = "NCCL receives from one rank, which is named";
  const std::string order =
      "NCCL has no tags, and runs the messages of two ranks one after the "
      "other";
  const std::string timeout =
      "a timeout ends NCCL's communicator, or the process";
  return {
      {"PointToPoint.AnySourceOfASubgroupIsARankOfTheWorld", source},
      {"PointToPoint.AnySourceTellsWhoSent", source},
      {"PointToPoint.AnyTensorGoesRoundARing", source},
      {"PointToPoint.ManyInFlightArriveInTheOrderTheyWereSent", order},
      {"PointToPoint.TagsTellMessagesApart", order},
      {"PointToPoint.ErrorsNameTheOtherEnd", timeout},
      {"Misuse.PointToPointNamesRanksTagsAndTensors", timeout},
      {"Works.ACallThatRanOutOfTimeBehindAnotherGivesNoWrongSums", timeout},
      {"Works.ATimeoutNamesOperationNumberGroupRankAndTimes", timeout},
      {"Works.AWaitThatTimesOutMayBeRepeated", timeout},
      {"Works.AnAsynchronousTimeoutComesOutOfWaitAndTheFuture", timeout},
      {"Reductions.SparseTensorsAreSummedWhateverTheirEntries",
       "NCCL takes no sparse tensors"},
  };
}

}  // namespace lockstep::internal::testing
