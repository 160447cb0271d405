/* kt.h - the public C API of libkt, the CPU side of kt, is this file and those that it
 * includes.
 *
 * The Python binding reads these files: plain C declarations, integer #defines and enums only.
 *
 * Three ideas carry the library.
 *  1. A *pool* is a pinned team of threads plus one row of kernels (an ISA), chosen when it is made.
 *  2. A *weight* is packed once, in one layout that every row reads; a number format is data (kt_format).
 *  3. A *program* is a list of operations over fixed buffers, recorded once and replayed by one call
 *     per step: one token (decode) or many (prefill). Nothing is allocated while it runs.
 *
 * Conventions: functions that can fail return KT_OK or a negative KT_ERR_*; the handle's _error()
 * gives one sentence with the offending values, valid until the next call on that handle. create
 * functions return NULL on failure and write the sentence to `error`. _free(NULL) is fine. The library
 * never prints, aborts or exits, and holds no mutable global state. Memory the caller passes by
 * pointer stays the caller's and must outlive the handle it was recorded into.
 * Not thread-safe per handle; two programs may share a pool, but not run at the same time.
 */
#ifndef KT_H
#define KT_H

#include "kt_pool.h"
#include "kt_weights.h"
#include "kt_program.h"
#include "kt_operations.h"
#include "kt_adapters.h"
#include "kt_gradients.h"
#include "kt_offload.h"
#include "kt_sample.h"

#endif
