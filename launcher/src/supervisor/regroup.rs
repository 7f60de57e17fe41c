//! The next group in the same attempt, with more or fewer ranks than the running one.
//!
//! New ranks are started first, and wait at a store of their own. When all of them have joined, the launcher tells the
//! running ranks their places, and they join the new ones when the program has ended its step. `README.md` beside this
//! file shows the states.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use accelerator_host::{NO_SURVIVOR, ON_LOSS, SURVIVOR};
use rustix::process::Signal;

use super::attempt::{Attempt, Carried, last_lines, read_output};
use super::group::{GroupOutcome, GroupStep, Watch, watch};
use super::leftovers::end_group;
use super::spawner::{Growth, Resize, Spawner};
use super::store::{Store, StoreHandle};
use crate::error::{Result, chain};
use crate::event::{Channel, Event};
use crate::output::Output;
use crate::process::RankProcess;
use crate::settings::rank_env::RankEnv;
use crate::settings::{Elastic, Layout, Settings};
use crate::text::list;

/// The time that new ranks may take to join. The others run meanwhile.
const JOIN_TIMEOUT: Duration = Duration::from_secs(600);

/// The same limit while other hosts wait for their turn.
const JOIN_TIMEOUT_WITH_OTHERS: Duration = Duration::from_secs(30);

/// The time in which survivors of a loss must follow the first of them that has joined. A rank learns of the loss at the
/// end of its step.
const SURVIVORS_JOIN_WITHIN: Duration = Duration::from_secs(60);

/// The interval at which the launcher checks if they are late.
const JOIN_POLL: Duration = Duration::from_secs(1);

/// The time after which the launcher warns the user that ranks know of a next group and do not form it.
const NOTE_AFTER: Duration = Duration::from_secs(60);

/// The shortest time between two tries.
const LEAST_RETRY: Duration = Duration::from_millis(100);

/// The reason for another group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// The number of ranks is to change.
    Resize,
    /// Ranks were lost.
    Loss,
}

/// Forms the next group while the current one runs.
pub(super) struct Regrouping<'a> {
    spawner: &'a dyn Spawner,
    package_dir: Option<&'a Path>,
    /// The settings of the running group.
    settings: &'a Settings,
    /// True if the ranks that are left after a loss know that they do not continue.
    has_refused: bool,
    output: Output,
    store: &'a Store,
    /// Wakes the main thread.
    events: Sender<Event>,
    next: Option<NextGroup>,
    was_told: bool,
    /// The time before which no ranks are started again.
    retry_at: Option<Instant>,
    retry_after: Duration,
    /// The number of next groups that have been given up.
    given_up: u64,
    /// The number of streams of their ranks that were read.
    given_up_readers: usize,
    /// The time of the last [`step`](Self::step).
    stepped_at: Instant,
}

/// A group whose ranks have not all joined.
pub(super) struct NextGroup {
    attempt: Attempt,
    channel: Channel,
    /// The rank that each rank has in the running group; `None` if it is new.
    former: Vec<Option<usize>>,
    /// The processes of the new ranks, by rank.
    started: Vec<Option<(Box<dyn RankProcess>, Watch)>>,
    /// The number of streams of the new ranks that are read.
    readers: usize,
    joined: BTreeSet<usize>,
    /// The time at which the first rank joined.
    first_joined: Option<Instant>,
    /// The events of its ranks so far.
    seen: Vec<Event>,
    /// True if this group has the survivors of a loss in the running group.
    is_recovery: bool,
    /// True if the ranks of the running group know their places in it.
    is_told: bool,
    began: Instant,
    /// The time at which the launcher warns that the running ranks take long; `None` before they
    /// know their places, and after the warning.
    note_at: Option<Instant>,
}

impl<'a> Regrouping<'a> {
    /// Creates it without a next group.
    pub(super) fn new(
        spawner: &'a dyn Spawner,
        package_dir: Option<&'a Path>,
        settings: &'a Settings,
        output: Output,
        store: &'a Store,
        events: Sender<Event>,
    ) -> Self {
        let is_alone = settings.layout.hosts() == 1 && !spawner.has_hosts();
        let shrunk = is_alone && settings.ranks < settings.most_ranks;
        Self {
            spawner,
            package_dir,
            settings,
            has_refused: false,
            output,
            store,
            events,
            next: None,
            was_told: false,
            retry_at: shrunk.then(|| Instant::now() + settings.regrow_wait()),
            retry_after: settings.regrow_wait(),
            given_up: 0,
            given_up_readers: 0,
            stepped_at: Instant::now(),
        }
    }

    /// Returns the time of the next call of [`step`](Self::step), if nothing happens before.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match &self.next {
            Some(next) => next.deadline(),
            None => {
                let both = self.retry_at.into_iter().chain(self.spawner.deadline());
                both.filter(|at| *at > self.stepped_at).min()
            }
        }
    }

    /// Advances as far as is possible now, while the group runs well; returns `true` once the next group is complete.
    pub(super) fn step(&mut self) -> bool {
        if self.settings.elastic.is_none() {
            return false;
        }
        self.stepped_at = Instant::now();
        self.spawner.let_go();
        // Ranks that leave do not wait for ranks that come.
        if self.next.as_ref().is_none_or(|next| !next.is_told)
            && let Some(resize) = self.spawner.resize(Growth::Later)
        {
            self.give_up(None);
            self.begin(resize, Reason::Resize);
        }
        if self.next.is_none()
            && let Some(resize) = self.growth()
        {
            self.begin(resize, Reason::Resize);
        }
        let Some(next) = &mut self.next else {
            return false;
        };
        if let Some((rank, lost)) = next.receive() {
            self.spawner.postpone(&[rank]);
            self.give_up(Some(lost));
            return false;
        }
        if !next.is_told && next.has_all_new() {
            next.tell(self.spawner, self.settings, self.store.handle());
        }
        if next.is_told {
            self.was_told = true;
            next.note_wait();
        } else if next.began.elapsed() > next.patience(self.spawner) {
            let absent = next.absent();
            let seconds = next.began.elapsed().as_secs();
            self.spawner.postpone(&absent);
            self.give_up(Some(format!(
                "{} did not join within {seconds} s",
                list(&absent)
            )));
            return false;
        }
        next.is_complete()
    }

    /// Forms a group of the `survivors` of a loss. `lost` has a text for each rank that has ended since the last call.
    pub(super) fn recover(&mut self, survivors: &[usize], lost: &[String]) -> GroupStep {
        self.stepped_at = Instant::now();
        let is_of = |next: &NextGroup| {
            let former = next.former.iter().flatten().copied();
            next.is_recovery && former.eq(survivors.iter().copied())
        };
        if !self.next.as_ref().is_some_and(is_of) {
            self.give_up(None);
            let Some(resize) = self.spawner.without_lost(survivors) else {
                return GroupStep::GiveUp;
            };
            if !lost.is_empty() {
                self.output.note(&lost.join("; "));
            }
            self.begin(resize, Reason::Loss);
        }
        let Some(next) = &mut self.next else {
            return GroupStep::GiveUp;
        };
        // Survivors that end are events of the running group.
        let _ = next.receive();
        next.note_wait();
        let late = next.late();
        match (next.is_complete(), late.is_empty()) {
            (true, _) => GroupStep::HandOver,
            (false, true) => GroupStep::Run,
            (false, false) => {
                self.output
                    .note(&format!("{} did not join the others", list(&late)));
                GroupStep::Lose(late)
            }
        }
    }

    /// Tells the ranks that are left after a loss, once, that they do not continue.
    pub(super) fn refuse_survivors(&mut self) {
        if self.settings.survivors.is_some() && !std::mem::replace(&mut self.has_refused, true) {
            for rank in 0..self.settings.layout.ranks() {
                let refusal = (ON_LOSS.name.to_owned(), NO_SURVIVOR.to_owned());
                self.store.handle().tell_next_place(rank, vec![refusal]);
            }
        }
    }

    /// Ends the ranks that were to join: the group has failed or ended, or it continues without them because of `why`.
    pub(super) fn give_up(&mut self, why: Option<String>) {
        self.stepped_at = Instant::now();
        let Some(next) = self.next.take() else {
            return;
        };
        for (process, _) in next.started.iter().flatten() {
            end_group(&**process, Signal::KILL);
        }
        self.given_up_readers += next.readers;
        self.spawner.drop_next();
        self.given_up += 1;
        match why {
            // Each host has its own pause.
            Some(why) if self.spawner.has_hosts() => {
                self.output
                    .note(&format!("{why}; the job continues without"));
            }
            Some(why) => self.retry(&format!("{why}; the job continues as it is")),
            None => {}
        }
    }

    /// Returns the number of streams read for ranks that were given up; their ends are reported like those of others.
    pub(super) fn given_up_readers(&self) -> usize {
        self.given_up_readers
    }

    fn retry(&mut self, why: &str) {
        let after = self.retry_after.max(LEAST_RETRY);
        self.retry_at = Some(Instant::now() + after);
        self.retry_after = after * 2;
        let seconds = after.as_secs_f64();
        self.output
            .note(&format!("{why}, and tries again in {seconds} s"));
    }

    /// Returns the smallest number of ranks that may continue after a loss; `None` if the group does not continue.
    pub(super) fn least_survivors(&self) -> Option<NonZeroUsize> {
        self.settings.survivors
    }

    /// Returns `true` if ranks have been told to form another group.
    pub(super) fn was_told(&self) -> bool {
        self.was_told
    }

    /// The store of the next group, if its ranks know of it, and the rank that `rank` has there.
    pub(super) fn told(&self, rank: usize) -> Option<(StoreHandle, Option<usize>)> {
        let next = self.next.as_ref().filter(|next| next.is_told)?;
        let rank = next.former.iter().position(|former| *former == Some(rank));
        Some((next.attempt.store.handle(), rank))
    }

    /// The next group, if all of its ranks have joined.
    pub(super) fn take_complete(&mut self) -> Option<NextGroup> {
        self.next.take_if(|next| next.is_complete())
    }

    /// Returns the growth that the job should begin now, if any.
    fn growth(&self) -> Option<Resize> {
        if self.retry_at.is_some_and(|at| self.stepped_at < at) {
            return None;
        }
        let own = self.settings.ranks.get();
        let most = self.settings.most_ranks;
        let regrown = || Resize {
            layout: Layout::of_one_host(most),
            former: (0..most.get())
                .map(|rank| (rank < own).then_some(rank))
                .collect(),
            why: format!("tries to have {most} ranks again"),
        };
        let is_alone = self.settings.layout.hosts() == 1 && !self.spawner.has_hosts();
        let of_hosts = self.spawner.resize(Growth::Now);
        of_hosts.or_else(|| (is_alone && own < most.get()).then(regrown))
    }

    fn begin(&mut self, resize: Resize, reason: Reason) {
        self.retry_at = None;
        self.output.note(&format!("the job {}", resize.why));
        match NextGroup::begin(self, resize, reason) {
            Ok(mut next) => {
                if reason == Reason::Loss {
                    next.tell(self.spawner, self.settings, self.store.handle());
                }
                self.next = Some(next);
            }
            Err(error) if reason == Reason::Loss => {
                self.spawner.drop_next();
                self.given_up += 1;
                let error = chain(&error);
                self.output.note(&format!(
                    "the job cannot continue with the survivors: {error}"
                ));
            }
            Err(error) => {
                self.spawner.drop_next();
                self.given_up += 1;
                self.retry(&format!(
                    "the job cannot, and continues as it is: {}",
                    chain(&error)
                ));
            }
        }
    }
}

impl NextGroup {
    /// Returns `true` if `rank` of the running group is in this group, too.
    pub(super) fn keeps(&self, rank: usize) -> bool {
        self.former.contains(&Some(rank))
    }

    /// Returns `true` if this group consists of the survivors of a loss.
    pub(super) fn is_recovery(&self) -> bool {
        self.is_recovery
    }

    /// Turns it into an attempt that continues with the processes of `group`, the running group, which reports on
    /// `channel`.
    pub(super) fn into_attempt(
        mut self,
        group: Vec<Box<dyn RankProcess>>,
        mut carried: Carried,
        channel: &Channel,
        spawner: &dyn Spawner,
        outcome: &GroupOutcome,
        former_output: &Output,
    ) -> (Attempt, Channel) {
        let watched = group.into_iter().zip(std::mem::take(&mut carried.watches));
        let mut group: Vec<_> = watched.map(Some).collect();
        for (rank, (former, started)) in self.former.iter().zip(self.started).enumerate() {
            let kept = former.and_then(|former| group.get_mut(former)?.take());
            if let Some((process, watch)) = kept.or(started) {
                watch.redirect(rank, self.channel.sender.clone());
                carried.processes.push(process);
                carried.watches.push(watch);
            }
        }
        for (mut process, _) in group.into_iter().flatten() {
            if self.is_recovery {
                // The process has ended, and the drop ends what it started.
                drop(process);
            } else {
                // The process ends by itself, and its host with it.
                process.abandon();
            }
        }
        carried.readers += self.readers;
        spawner.adopt_next();
        let output = &self.attempt.output;
        output.relabel(former_output, self.channel.sender.clone());
        // Events of the running group that have arrived meanwhile.
        let rank_of = |rank| self.former.iter().position(|former| *former == Some(rank));
        self.seen
            .extend(channel.events.try_iter().filter_map(|event| match event {
                Event::Ended { rank, end } => {
                    let rank = rank_of(rank)?;
                    Some(Event::Ended { rank, end })
                }
                Event::Drained
                | Event::Signal(_)
                | Event::ForwardSignal(_)
                | Event::ForwardedElsewhere
                | Event::OutputClosed => Some(event),
                _ => None,
            }));
        if outcome.was_notified() {
            self.seen.push(Event::ForwardedElsewhere);
        }
        for event in self.seen {
            // Its receiver is here.
            let _ = self.channel.sender.send(event);
        }
        let ranks = self.former.len();
        let ranks = match ranks {
            1 => "1 rank".to_owned(),
            _ => format!("{ranks} ranks"),
        };
        output.note(&format!("the job continues with {ranks}"));
        self.attempt.carried = Some(carried);
        (self.attempt, self.channel)
    }

    fn begin(of: &Regrouping<'_>, resize: Resize, reason: Reason) -> Result<Self> {
        let Resize { layout, former, .. } = resize;
        let mut settings = of.settings.regrouped(layout, of.given_up);
        settings.losses += u32::from(reason == Reason::Loss);
        let channel = Channel::new();
        let wake = of.events.clone();
        let attempt = Attempt::next(&of.output, of.store, settings, &former, &channel, wake)?;
        let joining = Settings {
            elastic: Some(Elastic::Joining),
            ..attempt.settings.clone()
        };
        let store = attempt.store.address();
        let token = attempt.store.token_file();
        let environment = RankEnv::new(&joining, store.port(), token, of.package_dir);
        of.spawner.begin_next(&joining, store)?;
        let mut next = Self {
            attempt,
            channel,
            started: former.iter().map(|_| None).collect(),
            former,
            readers: 0,
            joined: BTreeSet::new(),
            first_joined: None,
            seen: Vec::new(),
            is_recovery: reason == Reason::Loss,
            is_told: false,
            began: Instant::now(),
            note_at: None,
        };
        for rank in 0..next.former.len() {
            if next.former[rank].is_none() {
                let mut process = of.spawner.spawn(rank, &environment)?;
                next.readers += read_output(rank, &mut *process, &next.attempt.output)?;
                let watch = watch(rank, &*process, &next.channel.sender);
                next.started[rank] = Some((process, watch.waking(of.events.clone())));
            }
        }
        Ok(next)
    }

    /// Takes in the events of its ranks; returns a rank that was lost while nobody was waiting for it yet, and a text
    /// about its end.
    fn receive(&mut self) -> Option<(usize, String)> {
        for event in self.channel.events.try_iter() {
            match event {
                Event::Joined(rank) => {
                    self.joined.insert(rank);
                    self.first_joined.get_or_insert_with(Instant::now);
                }
                Event::Ended { rank, end } => {
                    let text = format!("it ended with {end}");
                    if !self.is_told {
                        let output = &self.attempt.output;
                        let words = last_lines(output, rank);
                        let words = words.last().map(|line| format!(": {line}"));
                        let words = words.unwrap_or_default();
                        let text = format!("rank {rank} was to join, and {text}{words}");
                        return Some((rank, text));
                    }
                    self.attempt.store.handle().report_exit(rank, text);
                }
                _ => {}
            }
            self.seen.push(event);
        }
        None
    }

    /// Returns the survivors, by their ranks in the running group, that have not followed the first one in time: they hang.
    fn late(&self) -> Vec<usize> {
        let is_over = |at: Instant| self.is_recovery && at.elapsed() >= SURVIVORS_JOIN_WITHIN;
        if !self.first_joined.is_some_and(is_over) {
            return Vec::new();
        }
        let ranks = self.former.iter().enumerate();
        ranks
            .filter(|(rank, _)| !self.joined.contains(rank))
            .filter_map(|(_, former)| *former)
            .collect()
    }

    fn is_complete(&self) -> bool {
        self.joined.len() == self.former.len()
    }

    /// The new ranks that have not joined.
    fn absent(&self) -> Vec<usize> {
        let new = (0..self.former.len()).filter(|&rank| self.former[rank].is_none());
        new.filter(|rank| !self.joined.contains(rank)).collect()
    }

    /// Returns the time that its new ranks may take to join.
    fn patience(&self, spawner: &dyn Spawner) -> Duration {
        match spawner.has_more() {
            true => JOIN_TIMEOUT_WITH_OTHERS,
            false => JOIN_TIMEOUT,
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self.is_told {
            true => {
                let late_at = self.first_joined.filter(|_| self.is_recovery);
                let late_at = late_at.map(|at| at + SURVIVORS_JOIN_WITHIN);
                self.note_at.into_iter().chain(late_at).min()
            }
            // The limit shrinks if another host waits, so it is checked again soon.
            false => Some(Instant::now() + JOIN_POLL),
        }
    }

    /// Warns the user, once, that the running ranks take long to leave their group.
    fn note_wait(&mut self) {
        let now = Instant::now();
        if self.note_at.is_some_and(|at| now >= at) {
            let calls = match self.is_recovery {
                true => "calls `recover` after the loss",
                false => "calls `regroup_pending` or `preempted` after a step",
            };
            self.attempt.output.note(&format!(
                "the ranks have not formed their next group within {} s; a program does so when it {calls}",
                NOTE_AFTER.as_secs()
            ));
            self.note_at = None;
        }
    }

    fn has_all_new(&self) -> bool {
        self.absent().is_empty()
    }

    /// Tells the ranks of the running group their places.
    fn tell(&mut self, spawner: &dyn Spawner, running: &Settings, store: StoreHandle) {
        self.is_told = true;
        self.note_at = Some(Instant::now() + NOTE_AFTER);
        let settings = &self.attempt.settings;
        let port = self.attempt.store.address().port();
        for former in 0..running.layout.ranks() {
            let rank = self.former.iter().position(|&known| known == Some(former));
            let mut place = rank.map_or_else(Vec::new, |rank| spawner.place(rank, settings, port));
            if self.is_recovery {
                if rank.is_none() {
                    continue;
                }
                place.push((ON_LOSS.name.to_owned(), SURVIVOR.to_owned()));
            }
            store.tell_next_place(former, place);
        }
        let new = self.former.iter().enumerate();
        let new: Vec<usize> = new
            .filter_map(|(rank, former)| former.is_none().then_some(rank))
            .collect();
        if !new.is_empty() {
            let output = &self.attempt.output;
            output.note(&format!(
                "waiting for the others to end their step: {}",
                list(&new)
            ));
        }
    }
}
