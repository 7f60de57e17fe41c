//! The cases that every transport must pass, for any world size.

pub(crate) mod cases;
mod computing;
pub(crate) mod sample;
mod scattering;
mod splitting;
pub(crate) mod world;

/// Defines the tests of one transport.
macro_rules! transport {
    ($transport:ident, $means:expr) => {
        mod $transport {
            use crate::suite::{cases, world::Means};

            const MEANS: Means = $means;

            world!(
                one,
                1,
                [reductions, exchanges],
                [
                    buffers,
                    broadcasts,
                    several_threads_share_a_handle,
                    misuse,
                    cuts_that_do_not_fit,
                    orderly_ends,
                ]
            );
            world!(
                two,
                2,
                [reductions, exchanges, whole, failures],
                [
                    buffers,
                    beyond_a_bucket,
                    misuse,
                    cuts_that_do_not_fit,
                    a_buffer_outlives_a_failure,
                    a_scattered_buffer_outlives_a_failure,
                ]
            );
            world!(
                three,
                3,
                [reductions, exchanges, whole, failures, parts],
                [
                    buffers,
                    beyond_a_bucket,
                    misuse,
                    cuts_that_do_not_fit,
                    a_buffer_outlives_a_failure,
                    a_scattered_buffer_outlives_a_failure,
                ]
            );
            world!(
                four,
                4,
                [reductions, exchanges, parts],
                [buffers, a_rank_that_panics]
            );
            world!(
                seven,
                7,
                [reductions, exchanges, failures],
                [
                    buffers,
                    broadcasts,
                    orderly_ends,
                    a_buffer_outlives_a_failure,
                    groups_cross,
                    groups_are_worlds,
                ]
            );
            waits!(
                2: [
                    a_rank_that_does_not_come,
                    a_rank_that_works_is_waited_for,
                    a_rank_that_works_no_more,
                    a_slow_rank_is_not_lost,
                ],
                3: [
                    a_rank_that_does_not_come,
                    a_rank_that_works_is_waited_for,
                    a_rank_that_works_no_more,
                    a_slow_rank_is_not_lost,
                ],
                7: [a_rank_that_does_not_come, a_rank_that_works_no_more],
            );
        }
    };
}

/// Defines the tests of one transport at one world size, from sets of cases and single cases.
macro_rules! world {
    ($name:ident, $world_size:expr, [$($set:ident),*], [$($case:ident),* $(,)?]) => {
        mod $name {
            $(set!($set, $world_size);)*
            tests!($world_size, [$($case),*]);
        }
    };
}

/// Defines the tests of a set of cases.
macro_rules! set {
    (reductions, $world_size:expr) => {
        tests!(
            $world_size,
            [
                every_type_and_reduction,
                many_chunks,
                ranks_start_as_they_like,
                scatters,
                scatters_are_started_as_ranks_like,
                shards_are_gathered,
                gathers_are_in_flight,
                started_beside_blocking,
            ]
        );
    };
    (exchanges, $world_size:expr) => {
        tests!($world_size, [gathers, objects, barriers]);
    };
    (whole, $world_size:expr) => {
        tests!(
            $world_size,
            [
                broadcasts,
                several_threads_share_a_handle,
                orderly_ends,
                nothing_succeeds_after_a_failure,
            ]
        );
    };
    (parts, $world_size:expr) => {
        tests!(
            $world_size,
            [
                groups_are_worlds,
                groups_cross,
                groups_fail_together,
                groups_outlive_the_handle_of_the_world,
                groups_are_divided_at_the_same_time,
                groups_end_in_order,
            ]
        );
    };
    (failures, $world_size:expr) => {
        tests!(
            $world_size,
            [
                disagreements,
                other_cuts,
                a_rank_that_finishes_early,
                a_rank_that_panics,
                a_rank_that_returns_early,
                a_rank_that_aborts,
                started_operations_fail_too,
            ]
        );
    };
}

/// Defines one test of the cases of one transport that compute nothing and wait for timeouts. They run at the same
/// time, each at its world size.
macro_rules! waits {
    ($($world_size:literal: [$($case:ident),* $(,)?]),* $(,)?) => {
        #[test]
        fn waits() {
            crate::suite::world::side_by_side(
                MEANS,
                &[$($((stringify!($case), $world_size, cases::$case)),*),*],
            );
        }
    };
}

macro_rules! tests {
    ($world_size:expr, [$($case:ident),* $(,)?]) => {
        $(
            #[test]
            fn $case() {
                super::cases::$case(super::MEANS, $world_size);
            }
        )*
    };
}
