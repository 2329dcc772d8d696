# The headers that a program may include. These headers declare their names in
# namespace lockstep (lockstep::nn, lockstep::optim, lockstep::metrics), all
# others in lockstep::internal, which programs leave alone.
set(LOCKSTEP_PUBLIC_HEADERS
  amp/autocast.h
  amp/clip_grad.h
  amp/grad_scaler.h
  base/required.h
  state/resumable_scheduler.h
  state/state_tree.h
  checkpoint/full_state_dict.h
  checkpoint/model_file.h
  checkpoint/module_state.h
  checkpoint/optimizer_state.h
  checkpoint/snapshot.h
  checkpoint/snapshot_error.h
  checkpoint/snapshot_saver.h
  checkpoint/state_item.h
  checkpoint/training_state.h
  comm/collective_options.h
  comm/collectives.h
  comm/distinct_tensors.h
  comm/empty_shared.h
  comm/gradient_shards.h
  comm/init.h
  comm/mpi/communicator.h
  comm/object_collectives.h
  comm/placement.h
  comm/point_to_point.h
  comm/process_group.h
  comm/reconfigure.h
  comm/record.h
  comm/register_backend.h
  comm/stop_request.h
  data/batch_sampler.h
  data/bucket_batch_sampler.h
  data/collate.h
  data/data_file_error.h
  data/data_loader.h
  data/data_loader_options.h
  data/dataset.h
  data/datasets/any_dataset.h
  data/datasets/cifar_dataset.h
  data/datasets/csv_dataset.h
  data/datasets/idx_dataset.h
  data/datasets/image_folder.h
  data/datasets/map_dataset.h
  data/datasets/safetensors_dataset.h
  data/datasets/selected_samples.h
  data/datasets/token_dataset.h
  data/distributed_sampler.h
  data/resumable_sampler.h
  data/sample_random.h
  data/sampler.h
  data/samplers.h
  data/tensor_dataset.h
  data/transforms.h
  launch/process/process_count.h
  launch/spawn.h
  launch/process/usable_cores.h
  launch/process/visible_gpus.h
  lockstep.h
  metrics/memory_stats.h
  metrics/metric.h
  metrics/metrics.h
  model_parallel.h
  observe/metrics_logger.h
  observe/profiler.h
  observe/progress_bar.h
  observe/summary_writer.h
  observe/system_metrics.h
  optim/adam.h
  optim/fused_optimizer.h
  optim/lr_scheduler/composed_schedulers.h
  optim/lr_scheduler/cosine_annealing.h
  optim/lr_scheduler/cyclic_schedulers.h
  optim/lr_scheduler/formula_schedulers.h
  optim/lr_scheduler/lambda_schedulers.h
  optim/lr_scheduler/lr_scheduler.h
  optim/lr_scheduler/lr_schedulers.h
  optim/lr_scheduler/reduce_lr_on_plateau.h
  optim/lr_scheduler/swalr.h
  optim/sgd.h
  parallel/checkpointing/checkpoint.h
  parallel/checkpointing/checkpoint_options.h
  parallel/comm_hooks/comm_bytes.h
  parallel/comm_hooks/comm_hooks.h
  parallel/comm_hooks/post_local_sgd_hook.h
  parallel/comm_hooks/power_sgd_hook.h
  parallel/context/context_shard.h
  parallel/context/ring_attention.h
  parallel/context/ulysses_attention.h
  parallel/data_parallel/container_values.h
  parallel/data_parallel/data_parallel.h
  parallel/data_parallel/scatter_gather.h
  parallel/ddp/comm_hook.h
  parallel/ddp/ddp_options.h
  parallel/ddp/distributed_data_parallel.h
  parallel/module/forward_result.h
  parallel/module/known_results.h
  parallel/ddp/logging_data.h
  parallel/fsdp/fully_shard.h
  parallel/fsdp/fully_shard_options.h
  parallel/healing/healed_training.h
  parallel/join/join.h
  parallel/join/joined_optimizer.h
  parallel/mesh/device_mesh.h
  parallel/mesh/dry_run.h
  parallel/mesh/mesh_layout.h
  parallel/model_averaging/averagers.h
  parallel/model_averaging/post_local_sgd_optimizer.h
  parallel/nn/convert_sync_batchnorm.h
  parallel/nn/sync_batch_norm.h
  parallel/pipeline/pipeline.h
  parallel/pipeline/pipeline_stage.h
  parallel/pipeline/schedule.h
  parallel/pipeline/schedule_check.h
  parallel/pipeline/schedule_simulation.h
  parallel/pipeline/schedules.h
  parallel/pipeline/stage_split.h
  parallel/swa/averaged_model.h
  parallel/swa/update_bn.h
  parallel/tensor/parallel_linear.h
  parallel/tensor/parallel_self_attention.h
  parallel/tensor/sequence_parallel_norm.h
  parallel/tensor/tensor_collectives.h
  parallel/tensor/tensor_parallel.h
  parallel/tensor/vocab_parallel_cross_entropy.h
  parallel/tensor/vocab_parallel_embedding.h
  parallel/module/wrapped_module.h
  parallel/zero/sharding_traits.h
  parallel/zero/zero_redundancy_optimizer.h
  parallel/zero/zero_redundancy_options.h
)

# lockstep_installed_headers(OUT): the public headers, and the internal ones that
# they include, as paths below the folder lockstep/.
function(lockstep_installed_headers out)
  set(found "")
  set(next ${LOCKSTEP_PUBLIC_HEADERS})
  while(next)
    list(POP_FRONT next header)
    if(header IN_LIST found)
      continue()
    endif()
    list(APPEND found ${header})
    set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY
      CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/lockstep/${header})
    file(STRINGS ${PROJECT_SOURCE_DIR}/lockstep/${header} lines
         REGEX "^#include \"lockstep/")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "^#include \"lockstep/([^\"]+)\".*" "\\1" line
             "${line}")
      list(APPEND next ${line})
    endforeach()
  endwhile()
  set(${out} ${found} PARENT_SCOPE)
endfunction()
