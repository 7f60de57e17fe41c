//! Runs one suite of cases over every transport, at 1, 2, 3, 4 and 7 ranks.

#[cfg(target_os = "linux")]
transport!(shm, Means::Shm);
transport!(tcp, Means::Tcp);
transport!(threads, Means::Threads);

#[cfg(target_os = "linux")]
mod hierarchical {
    use crate::suite::{cases, world::Means};

    const MEANS: Means = Means::Hierarchical;

    world!(
        three,
        3,
        [reductions, exchanges, whole, failures, parts],
        []
    );
    world!(
        four,
        4,
        [reductions, parts],
        [
            beyond_a_bucket,
            disagreements,
            other_cuts,
            a_rank_that_panics,
            a_rank_that_aborts,
        ]
    );
    world!(
        seven,
        7,
        [reductions],
        [a_rank_that_panics, groups_are_worlds, groups_cross]
    );
    waits!(
        3: [
            a_rank_that_does_not_come,
            a_rank_that_works_is_waited_for,
            a_rank_that_works_no_more,
            a_slow_rank_is_not_lost,
        ],
        4: [a_rank_that_does_not_come],
    );
}

/// Runs as many ranks as exchange headers in rounds, and one more.
#[cfg(target_os = "linux")]
mod rounds {
    mod tcp {
        use crate::suite::{cases, world::Means};

        const MEANS: Means = Means::Tcp;

        world!(
            seventeen,
            17,
            [exchanges, whole, failures],
            [
                every_type_and_reduction,
                ranks_start_as_they_like,
                started_beside_blocking
            ]
        );
        waits!(
            16: [a_rank_that_does_not_come],
            17: [
                a_rank_that_does_not_come,
                a_rank_that_works_is_waited_for,
                a_rank_that_works_no_more,
                a_slow_rank_is_not_lost,
            ],
        );
    }

    mod hierarchical {
        use crate::suite::{cases, world::Means};

        const MEANS: Means = Means::Hierarchical;

        world!(
            seventeen,
            17,
            [],
            [
                every_type_and_reduction,
                gathers,
                disagreements,
                a_rank_that_panics
            ]
        );
        waits!(17: [a_rank_that_does_not_come]);
    }
}

/// Runs more ranks than a typical host has cores.
mod many {
    use crate::suite::{cases, world::Means};

    #[test]
    fn threads() {
        cases::barriers(Means::Threads, 64);
        cases::orderly_ends(Means::Threads, 64);
    }

    #[test]
    fn processes() {
        cases::barriers(Means::Tcp, 12);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn processes_of_one_host() {
        cases::barriers(Means::Shm, 12);
    }
}
