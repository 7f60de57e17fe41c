//! Tests of the state machine, on simulated time.

use super::*;

const GRACE: Duration = Duration::from_secs(5);

fn machine(size: usize) -> (GroupMachine, Instant) {
    (GroupMachine::new(size, GRACE), Instant::now())
}

fn ended(rank: usize, end: End) -> Event {
    Event::Ended { rank, end }
}

fn blamed(rank: usize, blamed: &[usize]) -> Event {
    Event::FailureReported {
        rank,
        blamed: blamed.to_vec(),
    }
}

fn send(signal: i32, ranks: &[usize]) -> Action {
    Action::Signal {
        signal,
        ranks: ranks.to_vec(),
    }
}

const DIAGNOSE: Duration = Duration::from_millis(50);
const DIAGNOSE_ERROR: Duration = Duration::from_millis(250);
const ERROR_EXIT: i32 = 1;

#[test]
fn success_of_all_is_success() {
    let (mut machine, now) = machine(2);
    assert_eq!(machine.step(ended(1, End::Code(0)), now), []);
    assert!(!machine.is_over());
    assert_eq!(machine.deadline(), None);
    assert_eq!(machine.step(ended(0, End::Code(0)), now), []);
    assert!(machine.is_over());
    assert_eq!((machine.exit_code(), machine.cause()), (0, None));
}

#[test]
fn first_failure_ends_the_group_and_gives_the_code() {
    let (mut machine, now) = machine(3);
    assert_eq!(machine.step(ended(1, End::Code(7)), now), []);
    assert_eq!(machine.deadline(), Some(now + DIAGNOSE));
    let later = now + DIAGNOSE;
    assert_eq!(
        machine.step(Event::Tick, later),
        [send(signal::SIGTERM, &[0, 1, 2])]
    );
    machine.step(ended(0, End::Signal(signal::SIGTERM)), later);
    machine.step(ended(2, End::Code(1)), later);
    assert!(machine.is_over());
    assert_eq!(
        (machine.exit_code(), machine.cause()),
        (7, Some(Cause::Failure(1)))
    );
    assert!(machine.ended_by_itself(1));
    assert!(!machine.ended_by_itself(0));
}

/// Events, each with the milliseconds from the beginning, the exit code, and the cause.
type Case<'a> = (&'a [(u64, Event)], u8, Option<Cause>);

#[test]
fn the_exit_code_is_that_of_the_cause() {
    let killed = |rank, signal| ended(rank, End::Signal(signal));
    let exited = |rank, code| ended(rank, End::Code(code));
    let (by_int, by_term) = (
        Cause::Signal(signal::SIGINT),
        Cause::Signal(signal::SIGTERM),
    );
    let cases: [Case<'_>; 11] = [
        // A death by signal just after a failing exit is the cause.
        (
            &[(0, exited(0, 1)), (25, killed(1, signal::SIGSEGV))],
            139,
            Some(Cause::Failure(1)),
        ),
        // One by the launcher's own signal is not.
        (
            &[
                (0, exited(0, 3)),
                (50, Event::Tick),
                (50, killed(1, signal::SIGTERM)),
            ],
            3,
            Some(Cause::Failure(0)),
        ),
        // If all fail at once, nothing more is awaited.
        (
            &[(0, exited(1, 4)), (0, exited(0, 5))],
            4,
            Some(Cause::Failure(1)),
        ),
        (
            &[
                (0, Event::Signal(signal::SIGTERM)),
                (0, exited(0, 0)),
                (0, exited(1, 0)),
            ],
            143,
            Some(by_term),
        ),
        // A survivor dies in its clean-up.
        (
            &[
                (0, Event::Joined(0)),
                (0, Event::Joined(1)),
                (0, exited(1, 3)),
                (50, Event::Tick),
                (100, killed(0, signal::SIGSEGV)),
            ],
            3,
            Some(Cause::Failure(1)),
        ),
        // Every rank overcomes a loss.
        (
            &[
                (0, Event::Joined(0)),
                (0, blamed(0, &[1])),
                (0, exited(1, 0)),
                (0, exited(0, 0)),
            ],
            0,
            None,
        ),
        // Both would have to be preempted.
        (
            &[
                (0, Event::Signal(signal::SIGTERM)),
                (0, ended(0, End::PREEMPTED)),
                (0, killed(1, signal::SIGTERM)),
            ],
            143,
            Some(by_term),
        ),
        (
            &[
                (0, ended(0, End::PREEMPTED)),
                (0, killed(1, signal::SIGSEGV)),
            ],
            139,
            Some(Cause::Failure(1)),
        ),
        (
            &[(0, ended(0, End::PREEMPTED)), (0, exited(1, 1))],
            1,
            Some(Cause::Failure(1)),
        ),
        // A host that is lost later does not hide a failure, nor a signal.
        (
            &[(0, killed(0, signal::SIGSEGV)), (0, ended(1, End::Lost))],
            139,
            Some(Cause::Failure(0)),
        ),
        (
            &[
                (0, Event::Signal(signal::SIGINT)),
                (0, ended(0, End::Lost)),
                (0, ended(1, End::Lost)),
            ],
            130,
            Some(by_int),
        ),
    ];
    for (events, code, cause) in cases {
        let (mut machine, start) = machine(2);
        for (at, event) in events {
            machine.step(event.clone(), start + Duration::from_millis(*at));
        }
        assert!(machine.is_over(), "{events:?}");
        assert_eq!(
            (machine.exit_code(), machine.cause()),
            (code, cause),
            "{events:?}"
        );
    }
}

#[test]
fn another_code_just_after_an_error_is_the_root_cause() {
    // Rank 0 lost rank 1, which panicked and ended a little later.
    let (mut machine, now) = machine(3);
    machine.step(ended(0, End::Code(ERROR_EXIT)), now);
    assert_eq!(machine.deadline(), Some(now + DIAGNOSE_ERROR));
    assert_eq!(
        machine.step(ended(1, End::Code(101)), now + DIAGNOSE),
        [send(signal::SIGTERM, &[0, 1, 2])]
    );
    // The rank's own exit code identifies the root cause, so no more evidence is awaited.
    assert_eq!(
        machine.deadline(),
        Some(now + DIAGNOSE + GRACE.min(WAITING_NOTICE_AFTER))
    );
    // The first such code stays.
    machine.step(ended(2, End::Code(9)), now + DIAGNOSE);
    assert_eq!(
        (machine.exit_code(), machine.cause()),
        (101, Some(Cause::Failure(1)))
    );
}

#[test]
fn grace_then_kill_then_abandon() {
    let (mut machine, now) = machine(1);
    assert_eq!(
        machine.step(Event::Signal(signal::SIGINT), now),
        [send(signal::SIGINT, &[0])]
    );
    assert_eq!(machine.deadline(), Some(now + WAITING_NOTICE_AFTER));
    assert_eq!(
        machine.step(Event::Tick, now + WAITING_NOTICE_AFTER),
        [Action::Waiting(vec![0])]
    );
    assert_eq!(machine.deadline(), Some(now + GRACE));
    assert_eq!(
        machine.step(Event::Tick, now + GRACE),
        [send(signal::SIGKILL, &[0])]
    );
    assert!(machine.was_killed());
    assert!(!machine.is_over());
    assert_eq!(machine.step(Event::Tick, now + GRACE + ABANDON_AFTER), []);
    assert!(machine.is_over());
    assert_eq!(machine.exit_code(), 130);
}

#[test]
fn a_second_signal_kills_at_once() {
    let (mut machine, now) = machine(2);
    machine.step(Event::Signal(signal::SIGTERM), now);
    assert_eq!(
        machine.step(Event::Signal(signal::SIGINT), now),
        [send(signal::SIGKILL, &[0, 1])]
    );
    assert_eq!(machine.step(Event::Signal(signal::SIGINT), now), []);
    assert_eq!(machine.exit_code(), 143);
}

#[test]
fn closed_output_ends_quietly() {
    let (mut machine, now) = machine(1);
    assert_eq!(
        machine.step(Event::OutputClosed, now),
        [send(signal::SIGTERM, &[0])]
    );
    assert_eq!(machine.step(Event::OutputClosed, now), []);
    assert_eq!(machine.step(Event::Tick, now + WAITING_NOTICE_AFTER), []);
    assert_eq!(machine.exit_code(), 141);
}

#[test]
fn no_grace_kills_in_the_same_step() {
    let mut machine = GroupMachine::new(1, Duration::ZERO);
    let actions = machine.step(Event::Signal(signal::SIGINT), Instant::now());
    assert_eq!(
        actions,
        [send(signal::SIGINT, &[0]), send(signal::SIGKILL, &[0])]
    );
}

#[test]
fn ranks_that_joined_get_the_grace_period() {
    let (mut machine, now) = machine(3);
    machine.step(Event::Joined(0), now);
    machine.step(Event::Joined(1), now);
    assert_eq!(
        machine.step(ended(1, End::Signal(signal::SIGKILL)), now),
        []
    );
    // Rank 2 has not joined, so the store does not tell it of the loss.
    let later = now + JOIN_DELAY;
    assert_eq!(
        machine.step(Event::Tick, later),
        [send(signal::SIGTERM, &[1, 2])]
    );
    machine.step(ended(2, End::Signal(signal::SIGTERM)), now);
    machine.step(ended(0, End::Code(1)), now + GRACE / 2);
    assert!(machine.is_over());
    assert!(machine.ended_by_itself(0) && !machine.ended_by_itself(2));
    assert_eq!(
        (machine.exit_code(), machine.cause()),
        (137, Some(Cause::Failure(1)))
    );
}

#[test]
fn a_survivor_that_stays_is_told_after_the_grace_and_killed_after_another() {
    let (mut machine, now) = machine(2);
    machine.step(Event::Joined(0), now);
    machine.step(Event::Joined(1), now);
    machine.step(ended(1, End::Signal(signal::SIGKILL)), now);
    machine.step(Event::Tick, now + WAITING_NOTICE_AFTER);
    assert_eq!(machine.deadline(), Some(now + GRACE));
    assert_eq!(
        machine.step(Event::Tick, now + GRACE),
        [send(signal::SIGKILL, &[1]), send(signal::SIGTERM, &[0])]
    );
    assert_eq!(
        machine.step(Event::Tick, now + 2 * GRACE),
        [send(signal::SIGKILL, &[0, 1])]
    );
}

#[test]
fn a_silent_rank_is_the_root_cause_and_the_code_is_that_of_a_rank_that_lost_it() {
    let (mut machine, now) = machine(3);
    (0..3).for_each(|rank| drop(machine.step(Event::Joined(rank), now)));
    machine.step(blamed(0, &[1]), now);
    machine.step(blamed(2, &[1]), now);
    let later = now + Duration::from_millis(500);
    assert_eq!(machine.deadline(), Some(later));
    machine.step(ended(0, End::Code(3)), now + DIAGNOSE);
    machine.step(ended(2, End::Code(1)), now + DIAGNOSE);
    assert_eq!(
        machine.step(Event::Tick, later),
        [send(signal::SIGTERM, &[0, 1, 2])]
    );
    machine.step(ended(1, End::Signal(signal::SIGTERM)), later);
    assert_eq!(
        (machine.exit_code(), machine.cause()),
        (3, Some(Cause::Failure(1)))
    );
}

#[test]
fn a_signal_is_remembered_beside_a_failure() {
    let (mut machine, now) = machine(2);
    machine.step(ended(1, End::Signal(signal::SIGKILL)), now);
    assert_eq!(machine.asked_to_end(), None);
    machine.step(Event::Signal(signal::SIGINT), now);
    assert_eq!(machine.asked_to_end(), Some(signal::SIGINT));
    assert_eq!(machine.exit_code(), 137);
}

#[test]
fn a_rank_that_ends_well_without_joining_keeps_the_others_waiting() {
    let (mut machine, now) = machine(2);
    machine.step(ended(1, End::Code(0)), now);
    assert_eq!(machine.cause(), None);
    machine.step(Event::Joined(0), now);
    assert_eq!(machine.cause(), Some(Cause::Failure(1)));
    // The rank had joined, and the news was late.
    machine.step(Event::Joined(1), now);
    assert_eq!((machine.cause(), machine.deadline()), (None, None));
    machine.step(ended(0, End::Code(0)), now);
    assert_eq!(machine.exit_code(), 0);
}

#[test]
fn reports_that_arrive_after_the_ends_count() {
    let (mut machine, now) = machine(3);
    (0..3).for_each(|rank| drop(machine.step(Event::Joined(rank), now)));
    machine.step(ended(0, End::Code(4)), now);
    machine.step(ended(1, End::Code(5)), now);
    machine.step(ended(2, End::Code(4)), now);
    assert!(!machine.is_over());
    machine.step(blamed(0, &[1]), now);
    assert!(machine.is_over());
    assert_eq!(
        (machine.exit_code(), machine.cause()),
        (5, Some(Cause::Failure(1)))
    );
}

#[test]
fn waiting_for_reports_is_bounded() {
    let (mut machine, now) = machine(2);
    (0..2).for_each(|rank| drop(machine.step(Event::Joined(rank), now)));
    machine.step(ended(0, End::Code(1)), now);
    machine.step(ended(1, End::Code(1)), now);
    assert!(!machine.is_over());
    machine.step(Event::Tick, now + DIAGNOSE_ERROR);
    assert!(machine.is_over());
    assert_eq!(machine.exit_code(), 1);
}

#[test]
fn a_rank_that_closed_its_group_is_not_blamed() {
    let (mut machine, now) = machine(2);
    (0..2).for_each(|rank| drop(machine.step(Event::Joined(rank), now)));
    machine.step(ended(1, End::Code(0)), now);
    machine.step(ended(0, End::Code(7)), now);
    assert_eq!(machine.cause(), Some(Cause::Failure(1)));
    machine.step(Event::Closed(1), now);
    assert_eq!(machine.cause(), Some(Cause::Failure(0)));
}

#[test]
fn a_join_notice_can_arrive_after_a_death() {
    let (mut machine, now) = machine(2);
    machine.step(Event::Joined(1), now);
    machine.step(ended(1, End::Signal(signal::SIGKILL)), now);
    assert_eq!(
        machine.step(Event::Joined(0), now + JOIN_DELAY / 2),
        [send(signal::SIGTERM, &[1])]
    );
}

#[test]
fn preempted_ranks_end_as_they_like_and_the_job_with_their_code() {
    let (mut machine, now) = machine(2);
    (0..2).for_each(|rank| drop(machine.step(Event::Joined(rank), now)));
    assert_eq!(machine.step(ended(1, End::PREEMPTED), now), []);
    let later = now + Duration::from_secs(1);
    // The rank gets the grace period, as the survivor of a failure does.
    assert_eq!(
        machine.step(Event::Tick, later),
        [send(signal::SIGTERM, &[1])]
    );
    machine.step(ended(0, End::PREEMPTED), later);
    assert!(machine.is_over(), "no report is awaited");
    assert_eq!(
        (machine.exit_code(), machine.cause()),
        (75, Some(Cause::Preempted))
    );
    assert!(!machine.was_notified());
}

#[test]
fn ranks_that_save_on_a_signal_of_the_launcher_give_the_code() {
    for signal in [signal::SIGTERM, signal::SIGINT] {
        let (mut machine, now) = machine(2);
        machine.step(Event::Signal(signal), now);
        (0..2).for_each(|rank| drop(machine.step(ended(rank, End::PREEMPTED), now)));
        assert_eq!(
            (machine.exit_code(), machine.cause()),
            (75, Some(Cause::Preempted))
        );
        assert!(machine.was_notified() && machine.asked_to_end() == Some(signal));
    }
    let (mut machine, now) = machine(1);
    for stop_or_continue in [signal::SIGTSTP, signal::SIGCONT] {
        machine.step(Event::ForwardSignal(stop_or_continue), now);
    }
    assert!(!machine.was_notified());
    machine.step(Event::ForwardSignal(signal::SIGUSR1), now);
    assert!(machine.was_notified() && machine.asked_to_end().is_none());
}

#[test]
fn a_host_that_is_lost_is_the_cause_of_what_its_ranks_were_blamed_for() {
    let (mut machine, now) = machine(3);
    machine.step(Event::Joined(0), now);
    machine.step(Event::Joined(1), now);
    machine.step(Event::Joined(2), now);
    // Ranks notice the silence of a host first, and the blamed one does not end.
    machine.step(blamed(0, &[1]), now);
    let later = now + Duration::from_millis(500);
    machine.step(Event::Tick, later);
    assert_eq!(machine.cause(), Some(Cause::Failure(1)));
    machine.step(ended(2, End::Lost), later);
    machine.step(ended(1, End::Lost), later);
    machine.step(ended(0, End::Code(ERROR_EXIT)), later);
    assert!(machine.is_over() && machine.ended_by_itself(1));
    assert_eq!(
        (machine.exit_code(), machine.cause()),
        (75, Some(Cause::Failure(2)))
    );
}

/// A group whose members have all joined, and which continues after a loss if `least` of them are left.
fn recovering(size: usize, least: usize) -> (GroupMachine, Instant) {
    let (machine, now) = machine(size);
    let mut machine = machine.with_survivors(NonZeroUsize::new(least));
    (0..size).for_each(|rank| drop(machine.step(Event::Joined(rank), now)));
    (machine, now)
}

#[test]
fn survivors_get_places_after_a_delay_in_which_others_can_be_lost() {
    let (mut machine, now) = recovering(4, 2);
    let lost = ended(1, End::Signal(signal::SIGKILL));
    assert_eq!(machine.step(lost, now), [send(signal::SIGKILL, &[1])]);
    assert_eq!(machine.recovery(), Some(Recovery::Settling));
    assert_eq!(machine.step(ended(2, End::Lost), now), []);
    assert_eq!(machine.deadline(), Some(now + LOSS_SETTLE));
    assert_eq!(machine.step(Event::Tick, now + LOSS_SETTLE), []);
    assert_eq!(machine.recovery(), Some(Recovery::Of(vec![0, 3])));
    // They do not form the group in time.
    let late = now + RECOVER_TIMEOUT;
    assert_eq!(machine.deadline(), Some(late));
    assert_eq!(
        machine.step(Event::Tick, late),
        [send(signal::SIGTERM, &[1, 2])]
    );
    assert_eq!(
        (machine.recovery(), machine.cause()),
        (None, Some(Cause::Failure(1)))
    );
}

#[test]
fn a_rank_that_hangs_is_killed_before_the_others_continue() {
    let (mut machine, now) = recovering(3, 1);
    machine.step(blamed(0, &[1]), now);
    machine.step(blamed(2, &[1]), now);
    let later = now + Duration::from_millis(500);
    assert_eq!(
        machine.step(Event::Tick, later),
        [send(signal::SIGKILL, &[1])]
    );
    machine.step(Event::Tick, later + LOSS_SETTLE);
    // It has not ended yet.
    assert_eq!(machine.recovery(), Some(Recovery::Settling));
    machine.step(ended(1, End::Signal(signal::SIGKILL)), later + LOSS_SETTLE);
    assert_eq!(machine.recovery(), Some(Recovery::Of(vec![0, 2])));
}

#[test]
fn survivors_that_do_not_continue_end_as_without_recovery() {
    let lost = || ended(1, End::Signal(signal::SIGKILL));
    // One ends with an error of its own, or because its program is complete.
    for code in [0, 1] {
        let (mut machine, now) = recovering(3, 1);
        machine.step(lost(), now);
        machine.step(ended(0, End::Code(code)), now);
        assert_eq!(machine.recovery(), None);
        assert_eq!(machine.cause(), Some(Cause::Failure(1)));
    }
    // Too few are left.
    let (mut machine, now) = recovering(3, 2);
    machine.step(lost(), now);
    machine.step(ended(0, End::Signal(signal::SIGKILL)), now);
    assert_eq!(machine.recovery(), None);
    // One has finished, or was preempted.
    let (mut machine, now) = recovering(3, 1);
    machine.step(Event::Closed(0), now);
    machine.step(lost(), now);
    assert_eq!(machine.recovery(), None);
    let (mut machine, now) = recovering(3, 1);
    machine.step(ended(1, End::PREEMPTED), now);
    machine.step(Event::Tick, now + Duration::from_secs(1));
    assert_eq!(machine.recovery(), None);
}

#[test]
fn ranks_that_have_not_joined_do_not_continue() {
    let (machine, now) = machine(3);
    let mut machine = machine.with_survivors(NonZeroUsize::new(1));
    machine.step(Event::Joined(1), now);
    machine.step(ended(1, End::Signal(signal::SIGKILL)), now);
    machine.step(Event::Tick, now + JOIN_DELAY);
    assert_eq!(machine.recovery(), None);
}

#[test]
fn a_signal_ends_a_group_that_recovers() {
    let (mut machine, now) = recovering(2, 1);
    machine.step(ended(1, End::Signal(signal::SIGKILL)), now);
    let actions = machine.step(Event::Signal(signal::SIGINT), now);
    assert_eq!(actions, [send(signal::SIGINT, &[0, 1])]);
    assert_eq!((machine.recovery(), machine.exit_code()), (None, 130));
}
