//! The timeouts of an operation, and the words in which it ends.

use std::{
    fmt,
    time::{Duration, Instant},
};

use super::{LastOp, Peer, subset::Subset};
use crate::wire::GroupId;
use crate::{
    error::{Certainty, Culprit, Error, Kind, Result, Seconds, list_ranks, stderr_fallback},
    fingerprint::CollectiveFingerprint,
    liveness::SUSPEND_THRESHOLD,
};

/// The timeouts of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpTimeouts {
    pub(crate) timeout: Duration,
    /// The time after which the first warning is logged; later ones follow until the wait ends.
    pub(crate) warn_after: Duration,
    pub(crate) limit: TimeoutKind,
}

/// The timeout of the group that bounds an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum TimeoutKind {
    /// The connect timeout, which continues whatever happens.
    Connect,
    /// The progress timeout, which begins anew with each progress.
    Progress,
}

/// The number of an operation, and its group.
#[derive(Clone, Debug)]
pub(crate) struct OpNumber {
    pub(crate) group: GroupId,
    pub(crate) sequence: u64,
    /// The members of the group; `None` for the world.
    pub(crate) subset: Option<Subset>,
}

impl OpNumber {
    /// Returns `true` if a rank takes part in it.
    pub(crate) fn has_member(&self, rank: usize) -> bool {
        let subset = self.subset.as_ref();
        subset.is_none_or(|subset| subset.members.contains(&rank))
    }

    /// Returns `true` if another rank was last seen in this operation.
    fn is_that_of(&self, last: &LastOp) -> bool {
        (self.group, self.sequence) == (last.group, last.sequence)
    }

    /// Describes the operation in which another rank was last seen.
    pub(super) fn describe(&self, last: &LastOp) -> String {
        let group = match self.group == last.group {
            true => "",
            false => " of another group",
        };
        let ago = last.at.map_or(String::new(), |at| {
            format!(", {} ago", Seconds(at.elapsed()))
        });
        let (sequence, fingerprint) = (last.sequence, &last.fingerprint);
        format!("collective #{sequence}{group}, {fingerprint}{ago}")
    }
}

/// "#7", or "#7 of ranks 0 and 2".
impl fmt::Display for OpNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.sequence)?;
        match &self.subset {
            Some(subset) => write!(f, " of {subset}"),
            None => Ok(()),
        }
    }
}

/// The clock of one operation of one rank.
#[derive(Debug)]
pub(crate) struct OpDeadline {
    /// This rank's number in the world.
    pub(crate) rank: usize,
    pub(crate) number: OpNumber,
    pub(crate) fingerprint: CollectiveFingerprint,
    timeouts: OpTimeouts,
    /// The last progress, where the limit is that of progress; else the beginning.
    began: Instant,
    /// The same, or the last sign of work of those that are waited for, where that came later.
    pub(crate) since: Instant,
    /// The time at which this thread wants to look at the clock again.
    due: Instant,
    /// The number of warnings of this wait that were due.
    warnings: u32,
    /// Set once this operation can only fail.
    shortened: bool,
    /// Set once the operation had to look at the clock.
    has_looked: bool,
}

impl OpDeadline {
    /// The clock of an operation that begins `now`.
    pub(crate) fn new(
        rank: usize,
        number: OpNumber,
        fingerprint: CollectiveFingerprint,
        timeouts: OpTimeouts,
        now: Instant,
    ) -> Self {
        Self {
            rank,
            number,
            fingerprint,
            timeouts,
            began: now,
            since: now,
            due: now,
            warnings: 0,
            shortened: false,
            has_looked: false,
        }
    }

    /// Returns `true` if the operation has waited so long, or for so much, that it has looked at the clock.
    pub(crate) fn has_looked(&self) -> bool {
        self.has_looked
    }

    /// Notes progress: the clock starts again, unless it is that of connecting.
    pub(crate) fn on_progress(&mut self, now: Instant) {
        self.has_looked = true;
        self.due = now;
        if self.timeouts.limit == TimeoutKind::Progress {
            self.began = now;
            self.since = now;
            self.warnings = 0;
        }
    }

    /// Notes progress at this moment, like [`on_progress`](Self::on_progress).
    pub(crate) fn restart(&mut self) {
        self.on_progress(Instant::now());
    }

    /// Waits no longer than the time until the warning from here on, whoever works.
    pub(crate) fn shorten(&mut self) {
        self.timeouts.timeout = self.timeouts.timeout.min(self.timeouts.warn_after);
        self.shortened = true;
    }

    /// Returns the time until which to wait before the next call, at most `longest` from now, and logs a warning when
    /// one is due. `active` returns the time at which a rank last showed that it works, which counts as progress of
    /// that rank; `peers` and `last` identify the ranks and the last operation of each.
    ///
    /// All of it follows from one look at the clock: a process that is stopped after it blames nobody, and the next
    /// look comes late.
    ///
    /// # Errors
    ///
    /// A timeout that names the missing ranks, those that work left out.
    pub(crate) fn tick(
        &mut self,
        longest: Duration,
        missing: impl Fn(&Self) -> Vec<usize>,
        active: impl Fn(usize) -> Option<Instant>,
        peers: &[Peer],
        last: impl Fn(usize) -> Option<LastOp>,
    ) -> Result<Instant> {
        let now = Instant::now();
        self.has_looked = true;
        self.compensate(now);
        if self.waited(now) > self.timeouts.timeout {
            self.since = self.last_sign(missing(self), &active, now)?;
            self.warnings = 0;
        }
        let waited = self.waited(now);
        if waited >= self.warning_due() {
            while waited >= self.warning_due() {
                self.warnings += 1;
            }
            self.warn(&missing(self), active, peers, last, now);
        }
        let left = self.timeouts.timeout.min(self.warning_due());
        let left = left.saturating_sub(waited).max(MIN_SLEEP);
        self.due = now + left.min(longest);
        Ok(self.due)
    }

    /// Subtracts the time for which this thread was kept from looking at the clock: messages that came in it could not
    /// be read, and a moment is given to read them.
    fn compensate(&mut self, now: Instant) {
        let late = now.saturating_duration_since(self.due);
        if late >= SUSPEND_THRESHOLD {
            let since = (self.since + late + SUSPEND_THRESHOLD).min(now);
            self.began += since.saturating_duration_since(self.since);
            self.since = since;
        }
    }

    fn waited(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    /// Returns the length of the wait at which the next warning is due: once, three times and six times the time that
    /// is set, and then every six times.
    fn warning_due(&self) -> Duration {
        let first = self.timeouts.warn_after;
        let times = match self.warnings {
            0 => return first,
            1 => 3,
            more => 6 * (more - 1),
        };
        first.max(MIN_WARN_AFTER).saturating_mul(times)
    }

    fn warn(
        &self,
        missing: &[usize],
        active: impl Fn(usize) -> Option<Instant>,
        peers: &[Peer],
        last: impl Fn(usize) -> Option<LastOp>,
        now: Instant,
    ) {
        let works = |rank: &usize| self.works(active(*rank), now).is_some();
        let working: Vec<usize> = missing.iter().copied().filter(works).collect();
        let mut text = format!(
            "rank {} has waited {} for {} in {self}; it gives up after {}",
            self.rank,
            Seconds(now.saturating_duration_since(self.began)),
            list_ranks(missing),
            Seconds(self.timeouts.timeout),
        );
        if !working.is_empty() {
            let working = list_ranks(&working);
            text.push_str(&format!(" without a sign of work, which {working} gave"));
        }
        for rank in missing.iter().take(MAX_DESCRIBED) {
            let Some(peer) = peers.get(*rank) else {
                continue;
            };
            text.push_str(&format!("; {peer}"));
            match last(*rank) {
                Some(last) if self.number.is_that_of(&last) => text.push_str(" is in it"),
                Some(last) => {
                    let seen = self.number.describe(&last);
                    text.push_str(&format!(" was last seen in {seen}"));
                }
                None => {}
            }
        }
        tracing::warn!(
            rank = self.rank,
            sequence = self.number.sequence,
            ?missing,
            "{text}"
        );
        stderr_fallback(&text);
    }

    /// The oldest of the last signs of work of those that are missing.
    fn last_sign(
        &self,
        missing: Vec<usize>,
        active: impl Fn(usize) -> Option<Instant>,
        now: Instant,
    ) -> Result<Instant> {
        let last = |rank: &usize| self.works(active(*rank), now);
        let idle: Vec<usize> = missing
            .iter()
            .copied()
            .filter(|x| last(x).is_none())
            .collect();
        match missing.iter().filter_map(last).min() {
            Some(oldest) if idle.is_empty() => Ok(oldest),
            Some(_) => Err(self.overdue(idle, now)),
            None => Err(self.overdue(missing, now)),
        }
    }

    /// The last sign of work of a rank, where the operation waits for it because of that.
    fn works(&self, active: Option<Instant>, now: Instant) -> Option<Instant> {
        let counts = self.timeouts.limit == TimeoutKind::Progress && !self.shortened;
        active.filter(|at| counts && now.saturating_duration_since(*at) <= self.timeouts.timeout)
    }

    pub(crate) fn lost(&self, peer: &Peer, cause: &str, certainty: Certainty) -> Error {
        self.blame(
            Kind::PeerLost,
            peer.culprit(cause, certainty),
            format_args!("{peer} is lost: {cause}"),
        )
    }

    pub(crate) fn left(&self, peer: &Peer) -> Error {
        let cause = "it closed its group";
        let message = format!(
            "{peer} left early: {cause} while rank {} was in {self}; it calls fewer collectives \
             than the others",
            self.rank
        );
        Error::blaming(
            Kind::PeerLeft,
            peer.culprit(cause, Certainty::Settled),
            message,
        )
    }

    pub(crate) fn protocol(&self, peer: &Peer, what: impl fmt::Display) -> Error {
        let cause = format!("it broke the protocol: {what}");
        let message = format!("{peer} is at fault: {cause}");
        let culprit = peer.culprit(cause, Certainty::Settled);
        self.blame(Kind::Protocol, culprit, format_args!("{message}"))
    }

    /// The error of a rank that another one has given up; `me` is this rank.
    pub(crate) fn given_up(&self, me: &Peer, by: usize, cause: &str) -> Error {
        self.blame(
            Kind::PeerLost,
            me.culprit(cause, Certainty::Settled),
            format_args!("{me} was declared lost by rank {by}: {cause}"),
        )
    }

    /// The error of a rank that did not run for so long that the others must have given it up.
    pub(crate) fn suspended(&self, me: &Peer, slept: Duration, seen: &str) -> Error {
        let cause = format!(
            "it did not run for {}: stopped, swapped out or starved; meanwhile {seen}",
            Seconds(slept)
        );
        let message = format!("{me} is lost: {cause}");
        self.blame(
            Kind::PeerLost,
            me.culprit(cause, Certainty::Settled),
            format_args!("{message}"),
        )
    }

    /// The error of a rank whose connections a fault has cut; `me` is this rank.
    pub(crate) fn disconnected(&self, me: &Peer) -> Error {
        self.lost(me, "its connections were cut", Certainty::Settled)
    }

    /// The error of an operation that runs while another thread ends the group.
    pub(crate) fn interrupted(&self) -> Error {
        let message = format!("rank {} gave up its group during {self}", self.rank);
        Error::closed(message)
    }

    fn blame(&self, kind: Kind, culprit: Culprit, what: fmt::Arguments<'_>) -> Error {
        let message = format!("{what}; rank {} was in {self}", self.rank);
        Error::blaming(kind, culprit, message)
    }

    fn overdue(&self, missing: Vec<usize>, now: Instant) -> Error {
        let advice = match self.timeouts.limit {
            TimeoutKind::Connect => "ranks that need longer ask for a longer connect timeout",
            TimeoutKind::Progress => {
                "a rank that needs longer shows that it works (`keep_alive`) or asks for a longer \
                 progress timeout, one that never comes hangs or took another path through the program"
            }
        };
        let (rank, who) = (self.rank, list_ranks(&missing));
        let waited = Seconds(now.saturating_duration_since(self.began));
        let quiet = match self.since > self.began {
            true => format!(
                ", the last {} without a sign of work",
                Seconds(self.waited(now))
            ),
            false => String::new(),
        };
        let message = format!("rank {rank} waited {waited} for {who} in {self}{quiet}; {advice}");
        Error::about(Kind::Timeout, missing, message)
    }
}

impl fmt::Display for OpDeadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective {}, {}", self.number, self.fingerprint)
    }
}

const MIN_SLEEP: Duration = Duration::from_millis(1);

/// The least `warn_after` that takes effect.
const MIN_WARN_AFTER: Duration = Duration::from_millis(10);

const MAX_DESCRIBED: usize = 4;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::fingerprint::{CallSite, OpKind};
    use crate::transport::tests::number;

    #[test]
    fn progress_gives_no_more_time_to_connect() {
        let deadline = |limit| {
            let timeouts = OpTimeouts {
                timeout: Duration::from_nanos(1),
                warn_after: Duration::from_secs(50),
                limit,
            };
            let fingerprint =
                CollectiveFingerprint::new(OpKind::Connect, CallSite::new("here.rs", 1));
            let mut deadline = OpDeadline::new(0, number(0), fingerprint, timeouts, Instant::now());
            deadline.on_progress(Instant::now() + Duration::from_secs(3600));
            deadline
        };
        let tick = |limit| tick(&mut deadline(limit), &[1], |_| Some(Instant::now()));
        assert!(tick(TimeoutKind::Progress).is_ok());
        let error = tick(TimeoutKind::Connect).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.ranks(), [1]);
        let text = error.to_string();
        assert!(text.ends_with("ask for a longer connect timeout"), "{text}");
    }

    fn tick(
        deadline: &mut OpDeadline,
        missing: &[usize],
        active: impl Fn(usize) -> Option<Instant>,
    ) -> Result<Duration> {
        let missing = |_: &OpDeadline| missing.to_vec();
        let due = deadline.tick(Duration::MAX, missing, active, &[], |_| None)?;
        Ok(due.saturating_duration_since(Instant::now()))
    }

    /// Lets time pass on a clock.
    fn pass(deadline: &mut OpDeadline, time: Duration) {
        deadline.began -= time;
        deadline.since -= time;
        deadline.due -= time;
    }

    #[test]
    fn warnings_are_repeated_at_growing_intervals() {
        let seconds = Duration::from_secs;
        let mut deadline = late();
        deadline.timeouts.warn_after = seconds(10);
        let mut due = Vec::new();
        for _ in 0..6 {
            due.push(deadline.warning_due());
            deadline.warnings += 1;
        }
        assert_eq!(due, [10, 30, 60, 120, 180, 240].map(seconds));
        // Several overdue warnings are logged as one.
        deadline.timeouts.timeout = seconds(1000);
        deadline.warnings = 0;
        deadline.since -= seconds(60);
        let calm = tick(&mut deadline, &[0], |_| None).unwrap();
        assert_eq!(deadline.warnings, 3);
        assert!(calm > seconds(40) && calm <= seconds(51), "{calm:?}");
        deadline.on_progress(Instant::now());
        assert_eq!(deadline.warning_due(), seconds(10));
        deadline.timeouts.warn_after = Duration::MAX;
        deadline.warnings = 9;
        assert_eq!(deadline.warning_due(), Duration::MAX);
    }

    /// A clock of a second that ran out, for ranks 0 and 2, of which the first works.
    fn late() -> OpDeadline {
        let timeouts = OpTimeouts {
            timeout: Duration::from_secs(1),
            warn_after: Duration::from_secs(1),
            limit: TimeoutKind::Progress,
        };
        let fingerprint = CollectiveFingerprint::new(OpKind::Barrier, CallSite::new("here.rs", 1));
        let mut deadline = OpDeadline::new(1, number(0), fingerprint, timeouts, Instant::now());
        deadline.began -= Duration::from_secs(9);
        deadline.since -= Duration::from_secs(9);
        deadline
    }

    #[test]
    fn who_works_is_waited_for_and_who_does_not_is_named() {
        let sign = Instant::now() - Duration::from_millis(500);
        let active = |rank| (rank == 0).then_some(sign);
        let mut deadline = late();
        let left = tick(&mut deadline, &[0], active).unwrap();
        assert!(left <= Duration::from_millis(500), "{left:?}");
        assert_eq!(deadline.since, sign);
        let error = tick(&mut late(), &[0, 2], active).unwrap_err();
        assert_eq!(error.ranks(), [2], "{error}");
        // It showed that it works, and then no more.
        let active = |_| Some(Instant::now() - Duration::from_secs(2));
        deadline.since -= Duration::from_secs(1);
        let error = tick(&mut deadline, &[0], active).unwrap_err();
        assert_eq!(error.ranks(), [0], "{error}");
        assert!(
            error.to_string().contains("without a sign of work"),
            "{error}"
        );
    }

    #[test]
    fn time_in_which_a_rank_did_not_run_is_not_waited() {
        let mut deadline = late();
        let (since, stop) = (deadline.since, Duration::from_secs(7));
        deadline.compensate(deadline.due + stop);
        assert_eq!(deadline.since, since + stop + SUSPEND_THRESHOLD);
        assert_eq!(deadline.began, deadline.since);
    }

    #[test]
    fn who_was_stopped_around_a_look_blames_nobody() {
        let stop = Duration::from_secs(9);
        let mut deadline = late();
        deadline.restart();
        // After the progress, and between a look and the sleep that follows it.
        for _ in 0..2 {
            pass(&mut deadline, stop);
            tick(&mut deadline, &[0], |_| None).unwrap();
        }
        // Looks that come in time count.
        let left = tick(&mut deadline, &[0], |_| None).unwrap();
        pass(&mut deadline, left);
        thread::sleep(Duration::from_millis(10));
        let error = tick(&mut deadline, &[0], |_| None).unwrap_err();
        assert_eq!(error.ranks(), [0], "{error}");
    }

    #[test]
    fn a_disagreement_waits_for_nobody_who_works() {
        let mut deadline = late();
        deadline.shorten();
        let error = tick(&mut deadline, &[0], |_| Some(Instant::now())).unwrap_err();
        assert_eq!(error.ranks(), [0], "{error}");
    }
}
