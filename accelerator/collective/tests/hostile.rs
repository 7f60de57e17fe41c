//! Traffic may be damaged in any way: ranks answer with an error or with the right sums, in bounded time and memory.
//!
//! Two ranks are connected through a proxy of the test, which knows frames and damages them. Ranks would notice a
//! change in the store's answer, so the proxy also stands in front of the store and replaces the address at which rank
//! 0 says that it listens.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails where its preparation does"
)]

use std::{
    alloc::System,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    ops::Range,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use accelerator_collective::internal::{Rendezvous, StoreHost, StoreServer};
use accelerator_collective::{
    GroupOptions, Launch, ProcessGroup, ReduceOp, Result, Topology, TransportKind,
};
use cap::Cap;
use ciborium::Value;

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Serializes the tests, which share the memory count.
static ALONE: Mutex<()> = Mutex::new(());

/// The memory that both ranks may take together: two queues of 16 MiB, buffers, and what the test itself holds.
const MEMORY_BOUND: usize = 96 << 20;

/// Holds up the flooded rank until the flood has ended.
static FLOODED: Barrier = Barrier::new(2);

const DEADLINE: Duration = Duration::from_secs(60);

/// Lengths of operations in one frame, in a part for each rank, and in parts that are cut.
const LENGTHS: [usize; 3] = [3, 5000, 300_000];

#[test]
fn undamaged_frames_give_the_right_sums() {
    let played = play(None);
    assert!(played.outcomes.iter().all(Result::is_ok), "{played:?}");
    assert!(played.frames >= 10, "{played:?}");
}

#[test]
fn flipped_bits_are_noticed_wherever_they_are() {
    play_each(0..24, What::Flip, Played::assert_noticed);
}

#[test]
fn a_stream_that_is_cut_off_is_an_error() {
    play_each(100..112, What::Truncate, Played::assert_noticed);
}

#[test]
fn frames_that_come_twice_are_noticed_or_do_no_harm() {
    play_each(200..212, What::Duplicate, Played::assert_right);
}

#[test]
fn frames_in_the_wrong_order_are_noticed_or_do_no_harm() {
    play_each(300..312, What::Swap, Played::assert_right);
}

#[test]
fn lengths_beyond_the_bounds_are_refused_before_memory_is_taken() {
    play_each(400..408, What::Oversize, Played::assert_noticed);
}

#[test]
fn bytes_that_are_no_frames_are_refused() {
    play_each(500..508, What::Garbage, Played::assert_noticed);
}

#[test]
fn a_flood_of_empty_frames_does_not_fill_the_memory() {
    let played = play(Some(Damage::new(0, What::Flood)));
    played.assert_right();
}

/// The damage to one frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum What {
    Duplicate,
    Flip,
    Flood,
    Oversize,
    Garbage,
    Swap,
    Truncate,
}

/// The damage, its direction, its frame and its place in the frame.
#[derive(Clone, Copy, Debug)]
struct Damage {
    what: What,
    /// The rank whose traffic is damaged.
    from: usize,
    frame: usize,
    place: usize,
}

impl Damage {
    fn new(seed: u64, what: What) -> Self {
        let mut state = seed;
        let mut draw = |bound: usize| {
            // SplitMix64
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % bound as u64) as usize
        };
        Self {
            what,
            from: draw(2),
            // Each direction has at least five frames that are not heartbeats.
            frame: if what == What::Flood { 0 } else { draw(5) },
            place: draw(1 << 30),
        }
    }

    /// Writes the damaged frame and tells whether anything can follow.
    fn write(&self, frame: &[u8], next: &mut Option<Vec<u8>>, to: &mut TcpStream) -> Pass {
        let mut bytes = frame.to_vec();
        match self.what {
            What::Flip => {
                let bit = self.place % (bytes.len() * 8);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            What::Truncate => {
                let len = self.place % bytes.len();
                let _ = to.write_all(&bytes[..len]);
                return Pass::End;
            }
            What::Duplicate => bytes.extend_from_slice(frame),
            What::Swap => {
                *next = Some(bytes);
                return Pass::On;
            }
            What::Oversize => {
                let (at, value) = match self.place % 2 {
                    0 => (20, 16 * 1024 + 1),
                    _ => (24, u32::MAX),
                };
                bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
                let seal = crc32fast::hash(&bytes[..32]);
                bytes[32..36].copy_from_slice(&seal.to_le_bytes());
            }
            What::Garbage => {
                let garbage = self.place.to_le_bytes().repeat(20);
                bytes.splice(0..0, garbage);
            }
            What::Flood => {
                // The same header is repeated without data, as fast as possible.
                let preamble = u32::from_le_bytes(bytes[20..24].try_into().unwrap()) as usize;
                let preamble = bytes[HEAD..HEAD + preamble].to_vec();
                let mut empty = bytes[..HEAD].to_vec();
                empty[24..28].copy_from_slice(&[0; 4]);
                empty[28..32].copy_from_slice(&crc32fast::hash(&preamble).to_le_bytes());
                let seal = crc32fast::hash(&empty[..32]);
                empty[32..36].copy_from_slice(&seal.to_le_bytes());
                empty.extend_from_slice(&preamble);
                let block = empty.repeat(10_000);
                // A rank that stops reading would block this.
                let done = to.write_all(frame);
                let done = done.and_then(|()| (0..100).try_for_each(|_| to.write_all(&block)));
                FLOODED.wait();
                return match done {
                    Ok(()) => Pass::On,
                    Err(_) => Pass::End,
                };
            }
        }
        match to.write_all(&bytes) {
            Ok(()) => Pass::On,
            Err(_) => Pass::End,
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Pass {
    End,
    On,
}

/// The outcome of two ranks.
#[derive(Debug)]
struct Played {
    damage: Option<Damage>,
    outcomes: Vec<Result<()>>,
    /// The number of frames that went through.
    frames: usize,
    memory: usize,
    took: Duration,
}

impl Played {
    /// Asserts the bounds of memory and time. Wrong sums have panicked already.
    #[track_caller]
    fn assert_right(&self) {
        assert!(self.memory < MEMORY_BOUND, "{self:?}");
        assert!(self.took < DEADLINE, "{self:?}");
    }

    /// Asserts that the receiver reported the damage.
    #[track_caller]
    fn assert_noticed(&self) {
        self.assert_right();
        let receiver = 1 - self.damage.unwrap().from;
        let error = self.outcomes[receiver].as_ref().unwrap_err();
        assert!(error.is_protocol() || error.is_peer_lost(), "{self:?}");
        assert!(!error.ranks().is_empty(), "{self:?}");
    }
}

/// Plays with the damage of each seed, four at a time, since they mostly wait and share the memory bound.
fn play_each(seeds: Range<u64>, what: What, check: fn(&Played)) {
    let _alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
    let seeds: Vec<u64> = seeds.collect();
    for seeds in seeds.chunks(4) {
        thread::scope(|scope| {
            for seed in seeds {
                scope.spawn(|| check(&play_beside(Some(Damage::new(*seed, what)))));
            }
        });
    }
}

/// Plays alone.
fn play(damage: Option<Damage>) -> Played {
    let _alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
    play_beside(damage)
}

/// Lets two ranks compute over a connection on which one frame is damaged. Panics if a sum is wrong or takes too long.
fn play_beside(damage: Option<Damage>) -> Played {
    let before = MEMORY.allocated();
    let started = Instant::now();
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let real = store.local_addr();
    let frames = Arc::new(AtomicUsize::new(0));
    let door = door(real, damage, Arc::clone(&frames));

    let (sender, outcomes) = mpsc::channel();
    for (rank, port) in [(0, door.port()), (1, real.port())] {
        let sender = sender.clone();
        thread::spawn(move || {
            let outcome = compute(rank, port, damage);
            // The receiver is gone only if the test has failed already.
            let _ = sender.send((rank, outcome));
        });
    }
    let mut peak = 0;
    let mut all: Vec<Option<Result<()>>> = vec![None, None];
    while all.iter().any(Option::is_none) {
        peak = peak.max(MEMORY.allocated().saturating_sub(before));
        match outcomes.recv_timeout(Duration::from_millis(2)) {
            Ok((rank, outcome)) => all[rank] = Some(outcome),
            Err(_) => assert!(
                started.elapsed() < DEADLINE,
                "{damage:?}: no outcome in time: {all:?}"
            ),
        }
    }
    Played {
        damage,
        outcomes: all.into_iter().flatten().collect(),
        frames: frames.load(Ordering::Relaxed),
        memory: peak,
        took: started.elapsed(),
    }
}

fn compute(rank: usize, port: u16, damage: Option<Damage>) -> Result<()> {
    let launch = Launch::new(
        Topology::new(rank, 2).unwrap(),
        Rendezvous::new("127.0.0.1", port).with_store(StoreHost::Launcher),
    );
    let options = GroupOptions::new()
        .with_transport(TransportKind::Tcp)
        .with_connect_timeout(DEADLINE)
        .with_liveness_timeout(Duration::from_secs(2))
        .with_progress_timeout(Duration::from_secs(4));
    let group = ProcessGroup::connect(&launch, &options)?;
    for (number, len) in LENGTHS.into_iter().enumerate() {
        let flooded = |damage: Damage| damage.what == What::Flood && damage.from != rank;
        if number == 1 && damage.is_some_and(flooded) {
            // The program is busy elsewhere during the flood.
            FLOODED.wait();
        }
        let value = |rank: usize, index: usize| (rank * 1000 + index % 100) as f64;
        let mut values: Vec<f64> = (0..len).map(|index| value(rank, index)).collect();
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        let expected = (0..len).map(|index| value(0, index) + value(1, index));
        assert!(values.into_iter().eq(expected), "a wrong sum: {damage:?}");
    }
    group.close()
}

/// Stands in front of the store and leads others to the proxy instead of rank 0.
fn door(store: SocketAddr, damage: Option<Damage>, frames: Arc<AtomicUsize>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        // A rank may try several times until it is let in.
        for rank in listener.incoming().flatten() {
            let Ok(store) = TcpStream::connect(store) else {
                return;
            };
            let frames = Arc::clone(&frames);
            let back = (store.try_clone().unwrap(), rank.try_clone().unwrap());
            thread::spawn(move || {
                let (mut store, mut rank) = back;
                let _ = std::io::copy(&mut store, &mut rank);
                let _ = rank.shutdown(Shutdown::Write);
            });
            thread::spawn(move || {
                let (mut rank, mut store) = (rank, store);
                while let Some(message) = unit(&mut rank) {
                    let message = redirect(message, |real| mesh(real, damage, Arc::clone(&frames)));
                    if store.write_all(&message).is_err() {
                        break;
                    }
                }
                let _ = store.shutdown(Shutdown::Write);
            });
        }
    });
    address
}

/// Replaces the address in a registration, and leaves other messages as they are.
fn redirect(message: Vec<u8>, proxy: impl FnOnce(SocketAddr) -> SocketAddr) -> Vec<u8> {
    let mut value: Value = ciborium::from_reader(&message[ENVELOPE..]).unwrap();
    let Some(body) = field(&mut value, "Register").and_then(|x| field(x, "body")) else {
        return message;
    };
    let bytes = body.as_bytes().unwrap();
    let mut registration: Value = ciborium::from_reader(&bytes[..]).unwrap();
    let address = field(&mut registration, "address").unwrap();
    let real: SocketAddr = ciborium::from_reader(&written(address)[..]).unwrap();
    *address = ciborium::from_reader(&written(&proxy(real))[..]).unwrap();
    *body = Value::Bytes(written(&registration));
    let body = written(&value);
    let mut out = message[..ENVELOPE].to_vec();
    out[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
    out[12..16].copy_from_slice(&crc32fast::hash(&body).to_le_bytes());
    out.extend_from_slice(&body);
    out
}

/// Stands between rank 1 and rank 0 and damages one frame.
fn mesh(rank0: SocketAddr, damage: Option<Damage>, frames: Arc<AtomicUsize>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for rank1 in listener.incoming().flatten() {
            let Ok(rank0) = TcpStream::connect(rank0) else {
                return;
            };
            let timeout = Some(Duration::from_secs(5));
            let ends = [
                (0, rank0.try_clone().unwrap(), rank1.try_clone().unwrap()),
                (1, rank1, rank0),
            ];
            for (from, source, target) in ends {
                target.set_write_timeout(timeout).unwrap();
                target.set_nodelay(true).unwrap();
                let damage = damage.filter(|damage| damage.from == from);
                let frames = Arc::clone(&frames);
                thread::spawn(move || pass_on(source, target, damage, &frames));
            }
        }
    });
    address
}

fn pass_on(
    mut source: TcpStream,
    mut target: TcpStream,
    damage: Option<Damage>,
    frames: &AtomicUsize,
) {
    let mut number = 0;
    let mut held = None;
    while let Some(unit) = unit(&mut source) {
        let counts = unit[..4] == *b"ACLF" && unit[5] != HEARTBEAT;
        let pass = match damage {
            Some(damage) if counts && number == damage.frame => {
                damage.write(&unit, &mut held, &mut target)
            }
            _ => match target.write_all(&unit) {
                Ok(()) => Pass::On,
                Err(_) => Pass::End,
            },
        };
        if counts
            && (damage.is_none() || number != damage.unwrap().frame)
            && let Some(held) = held.take()
        {
            let _ = target.write_all(&held);
        }
        number += usize::from(counts);
        frames.fetch_add(usize::from(counts), Ordering::Relaxed);
        if pass == Pass::End {
            // Both ranks see the connection end.
            let _ = source.shutdown(Shutdown::Both);
            let _ = target.shutdown(Shutdown::Both);
            return;
        }
    }
    let _ = target.shutdown(Shutdown::Write);
}

/// Reads the next message or frame as a whole.
fn unit(from: &mut TcpStream) -> Option<Vec<u8>> {
    let mut bytes = vec![0; ENVELOPE];
    from.read_exact(&mut bytes).ok()?;
    let word = |bytes: &[u8], at: usize| {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
    };
    let len = if bytes[..4] == *b"ACLF" {
        bytes.resize(HEAD, 0);
        from.read_exact(&mut bytes[ENVELOPE..]).ok()?;
        word(&bytes, 20) + word(&bytes, 24)
    } else {
        word(&bytes, 8)
    };
    let start = bytes.len();
    bytes.resize(start + len, 0);
    from.read_exact(&mut bytes[start..]).ok()?;
    Some(bytes)
}

fn field<'a>(value: &'a mut Value, name: &str) -> Option<&'a mut Value> {
    let entries = value.as_map_mut()?;
    let entry = entries
        .iter_mut()
        .find(|(key, _)| key.as_text() == Some(name));
    entry.map(|(_, value)| value)
}

fn written(value: &impl serde::Serialize) -> Vec<u8> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes).unwrap();
    bytes
}

/// Sizes of the head of a frame and of the envelope of a message.
const HEAD: usize = 36;
const ENVELOPE: usize = 16;
const HEARTBEAT: u8 = 4;
