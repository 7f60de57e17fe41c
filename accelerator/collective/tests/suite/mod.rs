//! The cases that every transport must pass, for any world size.

pub(crate) mod cases;
pub(crate) mod sample;
pub(crate) mod world;

/// Tests of one transport.
macro_rules! transport {
    ($transport:ident, $means:expr) => {
        mod $transport {
            use super::suite::{cases, world::Means};

            const MEANS: Means = $means;

            world!(
                one,
                1,
                [
                    every_type_and_reduction,
                    many_chunks,
                    buffers,
                    broadcasts,
                    gathers,
                    objects,
                    barriers,
                    ranks_start_as_they_like,
                    started_beside_blocking,
                    several_threads_share_a_handle,
                    misuse,
                    orderly_ends,
                ]
            );
            world!(
                two,
                2,
                [
                    every_type_and_reduction,
                    many_chunks,
                    buffers,
                    beyond_a_bucket,
                    broadcasts,
                    gathers,
                    objects,
                    barriers,
                    ranks_start_as_they_like,
                    started_beside_blocking,
                    several_threads_share_a_handle,
                    misuse,
                    orderly_ends,
                    disagreements,
                    a_rank_that_does_not_come,
                    a_rank_that_finishes_early,
                    a_rank_that_panics,
                    a_rank_that_returns_early,
                    a_rank_that_aborts,
                    a_buffer_outlives_a_failure,
                    a_slow_rank_is_not_lost,
                    started_operations_fail_too,
                ]
            );
            world!(
                three,
                3,
                [
                    every_type_and_reduction,
                    many_chunks,
                    buffers,
                    beyond_a_bucket,
                    broadcasts,
                    gathers,
                    objects,
                    barriers,
                    ranks_start_as_they_like,
                    started_beside_blocking,
                    several_threads_share_a_handle,
                    misuse,
                    orderly_ends,
                    disagreements,
                    a_rank_that_does_not_come,
                    a_rank_that_finishes_early,
                    a_rank_that_panics,
                    a_rank_that_returns_early,
                    a_rank_that_aborts,
                    a_buffer_outlives_a_failure,
                    a_slow_rank_is_not_lost,
                    started_operations_fail_too,
                ]
            );
            world!(
                four,
                4,
                [
                    every_type_and_reduction,
                    many_chunks,
                    buffers,
                    gathers,
                    objects,
                    barriers,
                    ranks_start_as_they_like,
                    started_beside_blocking,
                    a_rank_that_panics,
                ]
            );
            world!(
                seven,
                7,
                [
                    every_type_and_reduction,
                    many_chunks,
                    buffers,
                    broadcasts,
                    gathers,
                    objects,
                    barriers,
                    ranks_start_as_they_like,
                    started_beside_blocking,
                    orderly_ends,
                    disagreements,
                    a_rank_that_does_not_come,
                    a_rank_that_finishes_early,
                    a_rank_that_panics,
                    a_rank_that_returns_early,
                    a_rank_that_aborts,
                    a_buffer_outlives_a_failure,
                    started_operations_fail_too,
                ]
            );
        }
    };
}

/// Tests of one transport at one world size.
macro_rules! world {
    ($name:ident, $world_size:expr, [$($case:ident),* $(,)?]) => {
        mod $name {
            $(
                #[test]
                fn $case() {
                    super::cases::$case(super::MEANS, $world_size);
                }
            )*
        }
    };
}
