//! A connection for messages, which are frames of JSON with heartbeats in both directions; the messages of launchers after
//! the handshake.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::num::NonZeroUsize;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::limit_backoff;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, Result};
use crate::output::Stream;
use crate::process::End;
use crate::settings::{Elastic, Layout};
use crate::supervisor::leftovers::LeftBehind;

/// The length of the largest frame.
const MAX_FRAME: usize = 1 << 20;

/// The longest time between two looks at the clock. Heartbeats are sent twice as often, as between ranks: a link that is
/// down for 3 s is then silent for 4.5 s at most, half a second before and up to a second until TCP sends again.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// One end of a connection for messages. Threads of its own send and receive, so that nobody waits for the network.
#[derive(Debug)]
pub(super) struct Line {
    outbox: Sender<Outgoing>,
    stream: TcpStream,
}

/// A line whose threads do not run yet.
#[derive(Debug)]
pub(super) struct LineStart {
    outgoing: Receiver<Outgoing>,
    stream: TcpStream,
}

/// The reason for which a line has ended; follows the name of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LineEnd {
    /// The other side has closed it, or its process has ended.
    Closed,
    /// It has failed.
    Failed(String),
    /// Nothing came for so long.
    Silent(Duration),
    /// This process was suspended for so long, and the other side has closed the connection meanwhile.
    Suspended(Duration),
}

impl Line {
    /// A line over `stream`, and what starts it.
    pub(super) fn new(stream: TcpStream) -> Result<(Self, LineStart)> {
        let (outbox, outgoing) = mpsc::channel();
        let copy = stream.try_clone().map_err(|error| broken(&error))?;
        let start = LineStart {
            outgoing,
            stream: copy,
        };
        Ok((Self { outbox, stream }, start))
    }

    /// Sends `message`, if the line has not ended.
    pub(super) fn send(&self, message: &impl Serialize) {
        // Messages are plain data, which can be written as JSON.
        if let Ok(body) = serde_json::to_vec(message) {
            let _ = self.outbox.send(Outgoing::Message(body));
        }
    }

    /// Ends the line when everything was sent.
    pub(super) fn finish(&self) {
        let _ = self.outbox.send(Outgoing::End);
    }

    /// Ends the line at once.
    pub(super) fn cut(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl LineStart {
    /// Starts the threads. `receive` gets every message, and at last why the line has ended, which it does when nothing
    /// was received for `liveness`.
    pub(super) fn run<M: DeserializeOwned>(
        self,
        liveness: Duration,
        mut receive: impl FnMut(std::result::Result<M, LineEnd>) + Send + 'static,
    ) -> Result<()> {
        let interval = (liveness / 4).min(MAX_INTERVAL);
        // If they cannot be set, heartbeats alone find a loss.
        let _ = self.stream.set_nodelay(true);
        limit_backoff(&self.stream);
        let _ = self.stream.set_write_timeout(Some(liveness));
        #[cfg(target_os = "linux")]
        let _ = rustix::net::sockopt::set_tcp_user_timeout(
            &self.stream,
            u32::try_from(liveness.as_millis()).unwrap_or(u32::MAX),
        );
        let reader = self.stream.try_clone().map_err(|error| broken(&error))?;
        let (writer, outgoing) = (self.stream, self.outgoing);
        spawn("host-writer", move || {
            write(writer, &outgoing, interval / 2)
        })?;
        spawn("host-reader", move || {
            let end = read(&reader, liveness, interval, &mut |message| {
                receive(Ok(message))
            });
            let _ = reader.shutdown(Shutdown::Both);
            receive(Err(end));
        })
    }
}

impl fmt::Display for LineEnd {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => formatter.write_str("its connection was closed"),
            Self::Failed(why) => write!(formatter, "its connection failed: {why}"),
            Self::Silent(silence) => write!(
                formatter,
                "nothing came from it for {:.1} s: it was stopped, switched off, or cut off from the network",
                silence.as_secs_f64()
            ),
            Self::Suspended(late) => write!(
                formatter,
                "this launcher was suspended for {:.1} s, and that host has given it up",
                late.as_secs_f64()
            ),
        }
    }
}

pub(super) fn write_frame(stream: &mut impl Write, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).map_err(|_| ErrorKind::InvalidInput)?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(body);
    stream.write_all(&frame)
}

pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|error| {
        Error::system("a thread for the connection between hosts could not be started")
            .with_source(error)
    })
}

/// The version of these messages and of the handshake: launchers of different versions do not work together.
pub(super) const PROTOCOL: u32 = 3;

/// The request of another host's launcher to be admitted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct JoinRequest {
    /// The number of hosts, as its user gave it.
    pub(super) hosts: usize,
    pub(super) host: usize,
    pub(super) purpose: ConnectionKind,
}

/// The purpose of a connection. A host has one for messages and one for each stream of output, so that output that
/// nobody reads delays no message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ConnectionKind {
    /// Messages.
    Messages(HostInfo),
    /// A stream of the ranks' output.
    Output {
        stream: Stream,
        /// The number that the head gave to the connection for messages.
        session: u64,
    },
}

/// A host as its launcher describes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HostInfo {
    #[serde(deserialize_with = "read_name")]
    pub(super) name: String,
    /// The process id of its launcher.
    pub(super) pid: u32,
    pub(super) ranks: usize,
    /// The job that its user named.
    pub(super) job: Option<String>,
    /// The restarts that its user asked for, which the head does not count by.
    pub(super) max_restarts: Option<u64>,
}

/// The head's answer to a host that it admits.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct JoinReply {
    /// The number of this connection for messages.
    pub(super) session: u64,
    /// Silence for which a host is lost.
    pub(super) liveness: Duration,
    /// The name of the head's host.
    #[serde(deserialize_with = "read_name")]
    pub(super) name: String,
}

/// Deserializes the name of a host, which is shown: if no token is required, it may be any text from anybody.
fn read_name<'a, D: Deserializer<'a>>(from: D) -> std::result::Result<String, D::Error> {
    let name = String::deserialize(from)?;
    Ok(name.chars().filter(|c| !c.is_control()).take(64).collect())
}

/// A message from a host to the head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToHead {
    /// Its program is built, and its ranks can be started.
    Ready,
    /// Its ranks can never be started; the launcher there ends with this code.
    Failed { code: u8, text: String },
    /// A rank was started.
    Started { restart: u64, rank: usize, pid: i32 },
    /// A rank could not be started. It is the user's error if no other rank could be either.
    NotStarted {
        restart: u64,
        rank: usize,
        text: String,
        is_usage: bool,
    },
    /// A rank has ended.
    Ended { restart: u64, rank: usize, end: End },
    /// Nothing of the attempt runs any more.
    Swept {
        restart: u64,
        left_behind: LeftBehind,
    },
    /// A signal asks the launcher there to end.
    Asked { signal: i32 },
    /// The launcher there has forwarded a signal to its ranks.
    Forwarded,
}

/// A message from the head to a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToHost {
    /// Start the host's ranks.
    StartAttempt(Plan),
    Signal {
        restart: u64,
        rank: usize,
        signal: i32,
        scope: SignalScope,
    },
    /// End the processes of the attempt: `first` is the first signal, SIGKILL follows after `grace`.
    EndAttempt {
        restart: u64,
        first: i32,
        grace: Duration,
    },
    /// The job is over: end with this code.
    JobOver { code: u8, text: Option<String> },
    /// The job continues without this host, which wanted to leave.
    Left,
}

/// An attempt, as far as hosts have to agree on it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    /// The number of restarts so far: the number of the attempt, which every message about it carries.
    pub(super) restart: u64,
    pub(super) max_restarts: u64,
    pub(super) job: String,
    /// The ranks of all hosts.
    pub(super) layout: Layout,
    /// The place of this host in the layout.
    pub(super) host: usize,
    /// The state that its ranks read if their number may change.
    pub(super) elastic: Option<Elastic>,
    /// The smallest number of ranks that may continue after a loss; `None` if the job does not continue.
    pub(super) survivors: Option<NonZeroUsize>,
    /// The host of the store, as this host reaches it.
    pub(super) store_host: String,
    pub(super) store_port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum SignalScope {
    Process,
    Group,
}

#[derive(Debug)]
enum Outgoing {
    Message(Vec<u8>),
    End,
}

fn write(mut stream: TcpStream, outgoing: &Receiver<Outgoing>, interval: Duration) {
    loop {
        let body = match outgoing.recv_timeout(interval) {
            Ok(Outgoing::Message(body)) => body,
            // An empty frame is a heartbeat.
            Err(RecvTimeoutError::Timeout) => Vec::new(),
            Ok(Outgoing::End) | Err(RecvTimeoutError::Disconnected) => {
                let _ = stream.shutdown(Shutdown::Write);
                return;
            }
        };
        if write_frame(&mut stream, &body).is_err() {
            // The reader tells of it.
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}

fn read<M: DeserializeOwned>(
    mut stream: &TcpStream,
    liveness: Duration,
    interval: Duration,
    receive: &mut impl FnMut(M),
) -> LineEnd {
    let mut silence = Silence::new(liveness, interval, Instant::now());
    let mut received = Vec::new();
    let mut chunk = [0; 4096];
    let mut pause = None;
    loop {
        let next = Some(silence.pause(Instant::now()));
        if next != pause {
            if let Err(error) = stream.set_read_timeout(next) {
                return LineEnd::Failed(error.to_string());
            }
            pause = next;
        }
        match stream.read(&mut chunk) {
            Ok(0) => return silence.explain(LineEnd::Closed, Instant::now()),
            Ok(count) => {
                silence.is_over(Instant::now());
                received.extend_from_slice(&chunk[..count]);
                loop {
                    match take_frame(&mut received) {
                        Ok(None) => break,
                        Ok(Some(body)) if body.is_empty() => {}
                        Ok(Some(body)) => match serde_json::from_slice(&body) {
                            Ok(message) => receive(message),
                            Err(error) => {
                                return LineEnd::Failed(format!("it sent no message: {error}"));
                            }
                        },
                        Err(length) => {
                            return LineEnd::Failed(format!("it sent a frame of {length} bytes"));
                        }
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if is_timeout(&error) => {
                if let Some(silence) = silence.at(Instant::now()) {
                    return LineEnd::Silent(silence);
                }
            }
            Err(error) => {
                let end = LineEnd::Failed(error.to_string());
                return silence.explain(end, Instant::now());
            }
        }
    }
}

/// Takes a whole frame off what was received; `None` where more has to come.
///
/// # Errors
/// The length of a frame that is too long.
fn take_frame(received: &mut Vec<u8>) -> std::result::Result<Option<Vec<u8>>, usize> {
    let Some(&header) = received.first_chunk::<4>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(header) as usize;
    if length > MAX_FRAME {
        return Err(length);
    }
    if received.len() < 4 + length {
        return Ok(None);
    }
    let body = received[4..4 + length].to_vec();
    received.drain(..4 + length);
    Ok(Some(body))
}

/// The silence of the other side, on this side's clock.
#[derive(Debug)]
struct Silence {
    liveness: Duration,
    interval: Duration,
    /// The time at which something came, or this process was found to have been suspended.
    since: Instant,
    looked_at: Instant,
    /// The time at which this process was last found to have been suspended, and for how long.
    suspended: Option<(Instant, Duration)>,
}

impl Silence {
    fn new(liveness: Duration, interval: Duration, now: Instant) -> Self {
        Self {
            liveness,
            interval,
            since: now,
            looked_at: now,
            suspended: None,
        }
    }

    /// Something has come.
    fn is_over(&mut self, now: Instant) {
        self.look(now);
        self.since = now;
    }

    /// The silence, if it is too long. The time in which this process was suspended does not count.
    fn at(&mut self, now: Instant) -> Option<Duration> {
        self.look(now);
        let silence = now.saturating_duration_since(self.since);
        (silence >= self.liveness).then_some(silence)
    }

    /// Returns the time to wait before the silence may be too long, or this process is to look at its clock.
    fn pause(&self, now: Instant) -> Duration {
        let silence = now.saturating_duration_since(self.since);
        let left = self.liveness.saturating_sub(silence);
        // A socket takes no timeout of zero.
        left.clamp(Duration::from_millis(1), self.interval)
    }

    /// Replaces `end` by [`LineEnd::Suspended`] if this process was suspended just before.
    fn explain(&mut self, end: LineEnd, now: Instant) -> LineEnd {
        self.look(now);
        match self.suspended {
            Some((at, late)) if now.saturating_duration_since(at) <= self.interval => {
                LineEnd::Suspended(late)
            }
            _ => end,
        }
    }

    fn look(&mut self, now: Instant) {
        let late = now.saturating_duration_since(self.looked_at + self.interval);
        if late > self.liveness / 4 {
            self.since = now;
            self.suspended = Some((now, late));
        }
        self.looked_at = now;
    }
}

/// Checks if nothing came within the time that a read may take.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn broken(error: &io::Error) -> Error {
    Error::system(format!("a connection between hosts failed: {error}"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    /// A line over `stream`, and what it receives.
    fn line(
        stream: TcpStream,
        liveness: Duration,
    ) -> (Line, Receiver<std::result::Result<Vec<u32>, LineEnd>>) {
        let (sender, received) = mpsc::channel();
        let (line, start) = Line::new(stream).unwrap();
        let receive = move |message| sender.send(message).unwrap();
        start.run(liveness, receive).unwrap();
        (line, received)
    }

    const LIVENESS: Duration = Duration::from_millis(400);
    const DEADLINE: Duration = Duration::from_secs(30);

    #[test]
    fn messages_arrive_in_order_and_heartbeats_keep_the_line() {
        // Longer than a busy machine keeps one thread from running, but not others.
        let liveness = 10 * LIVENESS;
        let (one, other) = pair();
        let (one, _one_received) = line(one, liveness);
        let (_other, received) = line(other, liveness);
        let long: Vec<u32> = (0..100_000).collect();
        one.send(&[1]);
        one.send(&long);
        assert_eq!(received.recv_timeout(DEADLINE).unwrap(), Ok(vec![1]));
        assert_eq!(received.recv_timeout(DEADLINE).unwrap(), Ok(long));
        assert!(
            received.recv_timeout(liveness * 5 / 4).is_err(),
            "the line holds"
        );
        one.send(&[2]);
        one.finish();
        assert_eq!(received.recv_timeout(DEADLINE).unwrap(), Ok(vec![2]));
        let end = received.recv_timeout(DEADLINE).unwrap();
        // If all threads were kept from running just before, the end tells that.
        let is_end = matches!(end, Err(LineEnd::Closed | LineEnd::Suspended(_)));
        assert!(is_end, "{end:?}");
    }

    #[test]
    fn silence_ends_a_line() {
        let (one, other) = pair();
        let (_line, received) = line(one, LIVENESS);
        let began = Instant::now();
        let end = received.recv_timeout(DEADLINE).unwrap();
        assert!(matches!(end, Err(LineEnd::Silent(_))), "{end:?}");
        assert!(began.elapsed() >= LIVENESS);
        drop(other);
    }

    #[test]
    fn what_is_no_frame_or_no_message_ends_a_line() {
        for sent in [
            &b"\xff\xff\xff\xff"[..],
            b"\x02\0\0\0{}",
            b"GET / HTTP/1.1\r\n",
        ] {
            let (one, mut other) = pair();
            let (_line, received) = line(one, DEADLINE);
            other.write_all(sent).unwrap();
            let end = received.recv_timeout(DEADLINE).unwrap();
            assert!(matches!(end, Err(LineEnd::Failed(_))), "{end:?}");
        }
    }

    #[test]
    fn a_line_looks_again_when_the_silence_becomes_too_long() {
        let (second, begin) = (Duration::from_secs(1), Instant::now());
        let silence = Silence::new(5 * second, second, begin);
        assert_eq!(silence.pause(begin), second);
        assert_eq!(silence.pause(begin + 4 * second), second);
        assert_eq!(silence.pause(begin + 9 * second / 2), second / 2);
        assert!(silence.pause(begin + 5 * second) > Duration::ZERO);
    }

    #[test]
    fn the_time_in_which_this_process_was_suspended_is_no_silence() {
        let (second, begin) = (Duration::from_secs(1), Instant::now());
        let mut silence = Silence::new(5 * second, second, begin);
        for at in 1..5 {
            assert_eq!(silence.at(begin + at * second), None);
        }
        assert_eq!(silence.at(begin + 60 * second), None);
        for at in 61..65 {
            assert_eq!(silence.at(begin + at * second), None);
        }
        assert_eq!(silence.at(begin + 65 * second), Some(5 * second));
        silence.is_over(begin + 65 * second);
        assert_eq!(silence.at(begin + 66 * second), None);
        let closed = silence.explain(LineEnd::Closed, begin + 67 * second);
        assert_eq!(closed, LineEnd::Closed);
        silence.is_over(begin + 90 * second);
        let closed = silence.explain(LineEnd::Closed, begin + 90 * second);
        assert_eq!(closed, LineEnd::Suspended(22 * second));
    }
}
