// Every op of the native core, by schema. Kernels are registered beside their code in cpu/ (and cuda/); what an op
// means in full is in the docstring of its typed face in gnnsys/ops/.
#include "common/shim.h"

#include <Python.h>

#include "cpu/store/small_pull.h"

// The library registers its ops when it is loaded; the module itself has what is called without torch.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, gnnsys::kSmallPullMethods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

STABLE_TORCH_LIBRARY(gnnsys, m) {
  // Sampling: cpu/sample.cpp, cpu/find_edges.cpp
  m.def(
      "sample_neighbors(Tensor indptr, Tensor indices, Tensor seeds, int fanout, bool replace, int key, "
      "Tensor? weight, Tensor? time, bool node_time, bool time_sorted, Tensor? seed_time, bool last, "
      "Tensor? exclude, Tensor? tree, Tensor? rng_ids) -> (Tensor indptr, Tensor neighbors, Tensor positions)");
  m.def("find_edges(Tensor indptr, Tensor indices, Tensor src, Tensor dst) -> Tensor");
  // Draws that are steered by a byte per source: cpu/sample_guided.cpp
  m.def(
      "sample_guided(Tensor indptr, Tensor indices, Tensor seeds, int fanout, int key, Tensor score, float deviation, "
      "bool proportional, bool unbiased, Tensor? exclude, Tensor? tree, Tensor? rng_ids) "
      "-> (Tensor indptr, Tensor neighbors, Tensor positions, Tensor weights)");
  // Edges among chosen nodes: cpu/induced.cpp. Keyed numbers: cpu/draw_below.cpp.
  m.def(
      "edges_within(Tensor indptr, Tensor indices, Tensor dst, Tensor? dst_tree, Tensor src, Tensor? src_tree, "
      "Tensor? exclude) -> (Tensor indptr, Tensor places, Tensor positions)");
  m.def(
      "induced_coo(Tensor indptr, Tensor indices, Tensor? edge_ids, Tensor dst, Tensor? dst_tree, Tensor src, "
      "Tensor? src_tree, Tensor? exclude) -> (Tensor row, Tensor col, Tensor edge)");
  m.def("draw_below(Tensor ids, int bound, int key) -> Tensor");
  // Walks along in-edges: cpu/walks.cpp
  m.def(
      "random_walks(Tensor indptr, Tensor indices, Tensor roots, int[] step_keys, int[] coin_keys, int coin, "
      "Tensor? original) -> Tensor");
  // All hops of a batch at once, on the device that `on` is on: cuda/sample_hops.cu alone. Lists have an entry per
  // relation or node type; `ends` has two per relation, `fanouts` and `keys` one per relation and hop.
  m.def(
      "sample_hops(Tensor[] indptr, Tensor[] indices, int[] num_parts, Tensor[] halo, Tensor[] bounds, "
      "Tensor[] edge_ids, Tensor[] original, int[] ends, int[] num_nodes, Tensor[] seeds, int[] fanouts, int[] keys, "
      "bool replace, bool labor, Tensor on) "
      "-> (Tensor[] nodes, Tensor[] edge_index, Tensor[] edge_ids, Tensor counts, Tensor[] weight)");

  // LABOR: cpu/sample_labor.cpp, cpu/normalize_rows.cpp
  m.def(
      "sample_labor(Tensor indptr, Tensor indices, Tensor seeds, int num_src, int fanout, int key, "
      "Tensor? source_ids, Tensor? exclude, Tensor? tree) -> (Tensor indptr, Tensor neighbors, Tensor positions, Tensor weight)");
  m.def("source_words(Tensor ids, int key) -> Tensor");
  m.def("normalize_rows(Tensor indptr, Tensor weight) -> Tensor");
  // LABOR-i: cpu/labor_importance.cpp, cuda/labor_importance.cu
  m.def(
      "sample_labor_importance(Tensor indptr, Tensor indices, Tensor seeds, int num_src, int fanout, int rounds, int key, "
      "Tensor? exclude) -> (Tensor indptr, Tensor neighbors, Tensor positions, Tensor weight)");
  // Whom walks visit: cpu/visits.cpp
  m.def("most_visited(Tensor visits, int most, Tensor? without) -> (Tensor root, Tensor ids, Tensor visits)");

  // Hops over several parts: cpu/sample_parts.cpp where all are at hand, cpu/stitch.cpp
  m.def(
      "sample_parts(Tensor[] indptr, Tensor[] indices, Tensor[] original, Tensor[] halo, Tensor dst_bounds, "
      "Tensor src_bounds, Tensor edge_bounds, Tensor seeds, int fanout, bool replace, int key, Tensor? tree, bool wide) "
      "-> (Tensor indptr, Tensor ids, Tensor edges)");
  m.def(
      "name_neighbors(Tensor indptr, Tensor neighbors, Tensor positions, int first, int num_core, Tensor halo, "
      "int first_edge, Tensor? order, bool wide_ids, bool wide_edges) -> (Tensor counts, Tensor ids, Tensor edges)");
  m.def(
      "stitch(Tensor order, Tensor[] counts, Tensor[] ids, Tensor[] edges, int[] segments, bool wide) "
      "-> (Tensor indptr, Tensor ids, Tensor edges)");

  // Relabelling: cpu/relabel.cpp; the last one with sampling: cpu/sample_into_table.cpp
  m.def("id_table_init(Tensor(a!) table, int log2_slots, bool wide) -> ()");
  m.def("relabel_seeds(Tensor(a!) table, Tensor ids) -> ()");
  m.def("relabel(Tensor(a!) table, Tensor ids) -> (Tensor local, Tensor fresh)");
  m.def("lookup(Tensor table, Tensor ids) -> Tensor");
  m.def("compact(Tensor(a!) scratch, Tensor[] seeds, Tensor[] ids, int[] types) -> (Tensor[] nodes, Tensor[] local)");
  m.def(
      "sample_into_table(Tensor(a!) table, Tensor indptr, Tensor indices, Tensor seeds, int fanout, bool replace, "
      "int key, Tensor(b!) rows, Tensor(c!) room) -> (Tensor indptr, Tensor edges, Tensor fresh)");

  // Owners: cpu/bucket.cpp
  m.def("bucket_ids(Tensor ids, Tensor bounds) -> (Tensor counts, Tensor order, Tensor local)");

  // Rows: cpu/rows.cpp
  m.def("gather_rows(Tensor src, Tensor index, ScalarType? dtype) -> Tensor");
  m.def("read_rows(Tensor src, Tensor index) -> int");
  m.def("gather_rows_out(Tensor src, Tensor index, Tensor(a!) out) -> ()");
  m.def("scatter_rows(Tensor(a!) dst, Tensor index, Tensor src) -> ()");

  // A table as a device reads it, some rows cached there, others in pieces: cuda/table_rows.cu alone.
  m.def(
      "read_table(Tensor[] srcs, int[] firsts, Tensor? cache, Tensor? slots, int num_rows, Tensor index, "
      "Tensor(a!) out, Tensor(b!)? hits) -> ()");

  // Host memory that a device may read where it is: cuda/page_lock.cu alone. Errors of CUDA's are returned, 0 is none.
  m.def("lock_pages(Tensor on, int address, int bytes, bool read_only) -> int");
  m.def("unlock_pages(Tensor on, int address) -> int");

  // Rows of which some have a copy in a faster place: cpu/cached_rows.cpp
  m.def(
      "gather_cached(Tensor cache, Tensor slots, Tensor src, Tensor index, Tensor(a!) out, Tensor(b!)? hits) -> ()");

  // The vectors that loops over features have: cpu/vectors/choose.cpp.
  m.def("simd_bytes() -> int");

  // Aggregation: cpu/spmm.cpp, cpu/sddmm.cpp, cpu/spmm_extreme.cpp. The t_ arguments are the transposed structure,
  // which autograd needs.
  m.def(
      "spmm(Tensor indptr, Tensor indices, Tensor? positions, Tensor x, Tensor? weight, Tensor? src_scale, "
      "Tensor? dst_scale, Tensor? t_indptr, Tensor? t_indices, Tensor? t_positions) -> Tensor");
  m.def(
      "spmm_add(Tensor indptr, Tensor indices, Tensor? positions, Tensor x, Tensor? weight, Tensor? src_scale, "
      "Tensor? dst_scale, Tensor(a!) out) -> ()");
  m.def(
      "spmm_out(Tensor indptr, Tensor indices, Tensor? positions, Tensor x, Tensor? weight, Tensor? src_scale, "
      "Tensor? dst_scale, Tensor(a!) out) -> ()");
  m.def("inverse_degrees(Tensor indptr, ScalarType dtype) -> Tensor");
  m.def(
      "sddmm(Tensor indptr, Tensor indices, Tensor? positions, Tensor dst_rows, Tensor src_rows, Tensor? src_scale, "
      "Tensor? dst_scale, Tensor? t_indptr, Tensor? t_indices, Tensor? t_positions) -> Tensor");
  m.def(
      "spmm_extreme(Tensor indptr, Tensor indices, Tensor x, Tensor? weight, bool minimum, Tensor? t_indptr=None, "
      "Tensor? t_indices=None, Tensor? t_positions=None) -> (Tensor out, Tensor arg)");
  m.def(
      "spmm_extreme_grad_x(Tensor indptr, Tensor indices, Tensor arg, Tensor grad, Tensor? weight, int num_src, "
      "Tensor? t_indptr=None, Tensor? t_indices=None, Tensor? t_positions=None) -> Tensor");
  m.def("spmm_extreme_grad_weight(Tensor indptr, Tensor indices, Tensor arg, Tensor grad, Tensor x) -> Tensor");

  // Rows of many relations at once: common/relation_conv.h. A relation is four numbers, the slots of what it reads, adds
  // to and is multiplied by, and its row there. The t_ arguments are the edges by source, which autograd needs.
  m.def(
      "relation_conv(Tensor[] x, Tensor[] weight, Tensor[] root, int[] own, int[] relations, int[] num_dst, int[] ends, "
      "Tensor? dst, Tensor? indptr, Tensor indices, Tensor? scale, int[] t_ends, Tensor? t_src, Tensor? t_indptr, "
      "Tensor? t_indices, Tensor? t_weight) -> Tensor[]");
  m.def(
      "relation_conv_grad(Tensor[] grad, Tensor[] x, Tensor[] weight, Tensor[] root, int[] own, int[] relations, "
      "int[] wants_x, int[] t_ends, Tensor t_src, Tensor? t_indptr, Tensor? t_indices, Tensor? t_weight) "
      "-> (Tensor[] grad_x, Tensor[] grad_weight, Tensor[] grad_root)");

  // Edges of many relations by (relation, destination) and by (relation, source), on a device: cuda/group_relations.cu. Of
  // `dst`, `src` and their indptr as much counts as the last of `ends` says.
  m.def("group_structures(Tensor[] indptr, int[] num_edges) -> (Tensor ends, Tensor dst, Tensor indptr)");
  m.def(
      "group_by_source(Tensor indptr, Tensor indices, Tensor dst, int[] ends, int[] num_src) "
      "-> (Tensor ends, Tensor src, Tensor indptr, Tensor indices, Tensor group)");

  // Edges of relations that come by destination, the indptrs and indices of all one behind the other, on a device:
  // cuda/sorted_structures.cu
  m.def("sorted_structures(Tensor[] edge_index, int[] num_dst) -> (Tensor indptr, Tensor indices)");

  // Attention: cpu/edge_softmax.cpp, cpu/attention.cpp
  m.def("edge_softmax(Tensor indptr, Tensor scores) -> Tensor");
  m.def("edge_softmax_grad(Tensor indptr, Tensor alpha, Tensor grad) -> Tensor");
  m.def(
      "gat_aggregate(Tensor indptr, Tensor indices, Tensor x, Tensor score_src, Tensor score_dst, Tensor? edge_score, "
      "float negative_slope, float dropout, int key, Tensor? t_indptr, Tensor? t_indices, Tensor? t_positions) "
      "-> (Tensor out, Tensor log_total)");
  m.def(
      "gat_aggregate_grad(Tensor indptr, Tensor t_indptr, Tensor t_indices, Tensor t_positions, Tensor x, "
      "Tensor score_src, Tensor score_dst, Tensor? edge_score, float negative_slope, float dropout, int key, "
      "Tensor out, Tensor log_total, Tensor grad) "
      "-> (Tensor grad_x, Tensor grad_src, Tensor grad_dst, Tensor grad_edge)");

  // Dropout by node: cpu/dropout_rows.cpp
  m.def("dropout_rows(Tensor x, Tensor ids, float p, int key) -> Tensor");

  // Structure: cpu/structure.cpp, cpu/subgraph.cpp
  m.def(
      "coo_to_csc(Tensor src, Tensor dst, int num_src, int num_dst, bool narrow=False) "
      "-> (Tensor indptr, Tensor indices, Tensor edge_ids)");
  m.def("transpose(Tensor indptr, Tensor indices, int num_src) -> (Tensor indptr, Tensor indices, Tensor positions)");
  m.def("degrees(Tensor ids, int num_nodes) -> Tensor");
  m.def("expand_indptr(Tensor indptr, int first, Tensor(a!) out) -> ()");
  m.def("in_subgraph(Tensor indptr, Tensor indices, Tensor nodes) -> (Tensor indptr, Tensor neighbors, Tensor positions)");
  m.def(
      "induced_subgraph(Tensor indptr, Tensor indices, Tensor nodes, Tensor? src_nodes=None) "
      "-> (Tensor indptr, Tensor local, Tensor positions)");
  m.def("bfs_order(Tensor indptr, Tensor indices, Tensor roots) -> Tensor");
  m.def("validate_csc(Tensor indptr, Tensor indices, int num_src) -> ()");

  // Made-up graphs: cpu/generate.cpp
  m.def("generate_permutation(Tensor(a!) out, int key) -> ()");
  m.def("generate_rmat(Tensor(a!) src, Tensor(b!) dst, Tensor order, float a, float b, float c, int key) -> ()");
  m.def(
      "generate_planted(Tensor(a!) src, Tensor(b!) dst, Tensor src_order, Tensor dst_order, int num_classes, "
      "float homophily, int src_skew, int dst_skew, bool loops, int key) -> ()");
  m.def("generate_features(Tensor(a!) rows, Tensor label, Tensor mean, float noise, int key) -> ()");

  // Partitioning: cpu/partition/. A graph is a list of neighbour lists, with three offsets each (first row, first
  // column, number of columns).
  m.def(
      "partition_cluster(Tensor[] indptr, Tensor[] indices, Tensor[] weight, int[] offsets, Tensor node_weights, "
      "Tensor limits, Tensor? part, int rounds, int key) -> (Tensor cluster, int num_clusters)");
  m.def(
      "partition_contract(Tensor[] indptr, Tensor[] indices, Tensor[] weight, int[] offsets, Tensor cluster, "
      "int num_clusters, bool heaviest) -> (Tensor indptr, Tensor indices, Tensor weight)");
  m.def(
      "partition_refine(Tensor[] indptr, Tensor[] indices, Tensor[] weight, int[] offsets, Tensor node_weights, "
      "Tensor(a!) part, int num_parts, Tensor limits, int passes, int work, int key) -> (int cut, float excess)");

  // Parts on disk: cpu/partition/relabel_part.cpp, cpu/partition/fingerprint.cpp
  m.def(
      "mark_halo(Tensor indptr, Tensor indices, Tensor columns, Tensor global_ids, int begin, int end, "
      "Tensor(a!) mask) -> ()");
  m.def("collect_halo(Tensor(a!) mask, Tensor[] earlier, bool wide) -> (Tensor ids, Tensor ranks)");
  m.def(
      "local_columns(Tensor indptr, Tensor indices, Tensor columns, Tensor global_ids, int begin, int end, "
      "Tensor[] masks, Tensor[] ranks, bool with_positions) -> (Tensor indptr, Tensor local, Tensor positions)");
  m.def("mark_ids(Tensor(a!) mask, Tensor ids) -> int");
  m.def("fingerprint_edges(Tensor indptr, Tensor indices, Tensor? dst_ids, Tensor? src_ids) -> Tensor");
  m.def("fingerprint_rows(Tensor rows, Tensor? ids, int first) -> Tensor");
  m.def("fingerprint_edge_rows(Tensor indptr, Tensor rows, Tensor? dst_ids, Tensor? order) -> Tensor");

  // Tables of edges: cpu/parse_table.cpp
  m.def("parse_table(Tensor text, str kinds, int delimiter, int first_line) -> Tensor[]");

  // Streaming assignment: cpu/partition/stream_*.cpp
  m.def(
      "stream_cluster(Tensor indptr, Tensor indices, int first, Tensor weight, Tensor(a!) label, Tensor(b!) size, "
      "Tensor(c!) counts, Tensor(d!)? orphans, int limit) -> int");
  m.def(
      "stream_contract(Tensor indptr, Tensor indices, int first, Tensor label, Tensor(a!) counts, Tensor(b!) keys, "
      "Tensor(c!) pair_counts, Tensor(d!) state) -> ()");
  m.def(
      "stream_refine(Tensor indptr, Tensor indices, int first, Tensor weights, Tensor(a!) part, Tensor(b!) load, "
      "Tensor limit, float price) -> (int, int)");
  m.def("stream_cut(Tensor indptr, Tensor indices, int first, Tensor part) -> int");
  m.def("drop_pages(Tensor rows) -> ()");

  // Communication between parts: cpu/partition/volume.cpp, volume_refine.cpp, even_out.cpp
  m.def("communication_volume(Tensor indptr, Tensor indices, Tensor part, int num_parts) -> Tensor");
  m.def("volume_changes(Tensor indptr, Tensor indices, Tensor part, int num_parts) -> Tensor");
  m.def(
      "refine_volume(Tensor indptr, Tensor indices, Tensor part, int num_parts, Tensor weights, Tensor limits, int key) "
      "-> (Tensor part, Tensor loads, Tensor stats)");
  m.def(
      "even_out(Tensor indptr, Tensor indices, Tensor part, int num_parts, Tensor weights, Tensor limits, "
      "float tolerance, float slack, int key) -> (Tensor part, Tensor loads, Tensor stats)");

  // Where tasks of a training job go: cpu/planning/walk_placements.cpp
  m.def("placement_bounds(Tensor[] job, Tensor[] cluster, Tensor placements) -> Tensor");
  m.def(
      "walk_placements(Tensor[] job, Tensor[] cluster, Tensor[] limits, Tensor start, Tensor movable, int cost, "
      "int steps, float beta, float last_beta, bool relative, float relaxed, float near, int key) "
      "-> (Tensor moves, Tensor costs, Tensor found, Tensor found_costs, Tensor found_steps)");

  // Training jobs on a cluster: cpu/planning/simulate.cpp
  m.def(
      "simulate_training(Tensor machine, Tensor seconds, Tensor threads, Tensor queued, Tensor source, Tensor target, "
      "Tensor lag, Tensor mode, Tensor volume, Tensor link_rates, Tensor uplink, Tensor cores, Tensor server_threads, "
      "int policy, bool explain) -> (Tensor task_times, Tensor task_cause, Tensor flow_times, Tensor flow_cause, "
      "Tensor limited, Tensor slowed)");
  m.def(
      "longest_training_path(Tensor machine, Tensor seconds, Tensor source, Tensor target, Tensor lag, Tensor mode, "
      "Tensor volume, Tensor flow_rates) -> float");

  // Tables: cpu/store/
  m.def("gather_parts(Tensor[] srcs, int[] parts, Tensor ids, Tensor bounds, Tensor(a!) out, Tensor? at) -> ()");
  m.def(
      "move_rows(Tensor src, Tensor? index, Tensor? order, Tensor(a!) out, Tensor? columns, Tensor? versions) -> bool");
  m.def("update_rows(Tensor(a!) dst, Tensor(b!)? versions, Tensor index, Tensor src, bool add) -> ()");
  m.def("fill_uniform(Tensor(a!) rows, int first, float low, float high, int key) -> ()");
  m.def(
      "sparse_adam_step(Tensor(a!) rows, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor[] versions, Tensor[] ids, "
      "Tensor[] grads, float ranks, float step_size, float beta1, float beta2, float eps) -> int");
  m.def(
      "sparse_adagrad_step(Tensor(a!) rows, Tensor(b!) sum, Tensor[] versions, Tensor[] ids, Tensor[] grads, "
      "float ranks, float step_size, float eps) -> int");
}
