//! Worlds of every kind, with threads of the test as ranks.

use std::{sync::mpsc, thread, time::Duration};

use accelerator_collective::internal::{Rendezvous, StoreHost, StoreServer};
use accelerator_collective::{GroupOptions, Launch, ProcessGroup, Topology, TransportKind};

/// The connection between the ranks of a test.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Means {
    /// Hosts of two ranks, the last of which may have one.
    Hierarchical,
    Shm,
    Tcp,
    Threads,
}

impl Means {
    /// Returns the maximum number of ranks per host.
    pub(crate) fn per_host(self, world_size: usize) -> usize {
        match self {
            Self::Hierarchical => 2,
            Self::Shm | Self::Tcp | Self::Threads => world_size,
        }
    }
}

/// Returns timeouts that a busy machine keeps.
pub(crate) fn long_timeouts() -> GroupOptions {
    GroupOptions::new()
        .with_connect_timeout(Duration::from_secs(60))
        .with_progress_timeout(Duration::from_secs(60))
}

/// Runs `body` once per rank, each on a thread of its own, and returns the results in rank order. Fails after two
/// minutes.
pub(crate) fn run<R: Send + 'static>(
    means: Means,
    world_size: usize,
    body: impl Fn(ProcessGroup) -> R + Clone + Send + 'static,
) -> Vec<R> {
    run_with(means, world_size, &long_timeouts(), body)
}

pub(crate) fn run_with<R: Send + 'static>(
    means: Means,
    world_size: usize,
    options: &GroupOptions,
    body: impl Fn(ProcessGroup) -> R + Clone + Send + 'static,
) -> Vec<R> {
    let (sender, results) = mpsc::channel();
    let start = |rank: usize, join: Box<dyn FnOnce() -> ProcessGroup + Send>| {
        let (body, sender) = (body.clone(), sender.clone());
        thread::spawn(move || {
            let result = body(join());
            // The receiver is gone only if the test has failed already.
            let _ = sender.send((rank, result));
        });
    };
    let mut store = None;
    match means {
        Means::Threads => {
            let ranks = ProcessGroup::threads(world_size, options).unwrap();
            for (rank, group) in ranks.into_iter().enumerate() {
                start(rank, Box::new(move || group));
            }
        }
        Means::Hierarchical | Means::Shm | Means::Tcp => {
            let transport = match means {
                Means::Hierarchical => TransportKind::Hierarchical,
                Means::Shm => TransportKind::Shm,
                _ => TransportKind::Tcp,
            };
            let server = StoreServer::bind(("127.0.0.1", 0), world_size, None).unwrap();
            let port = server.local_addr().port();
            store = Some(server);
            for rank in 0..world_size {
                let mut launch = launch(rank, world_size, port);
                if matches!(means, Means::Hierarchical) {
                    let first = rank / 2 * 2;
                    let size = 2.min(world_size - first);
                    let topology = launch.topology.with_local(rank - first, size);
                    launch.topology = topology.unwrap();
                }
                let options = options.clone().with_transport(transport);
                start(
                    rank,
                    Box::new(move || {
                        let group = ProcessGroup::connect(&launch, &options).unwrap();
                        assert!(world_size == 1 || group.transport() == transport);
                        group
                    }),
                );
            }
        }
    }
    drop(sender);
    let mut all: Vec<(usize, R)> = Vec::new();
    while all.len() < world_size {
        match results.recv_timeout(Duration::from_secs(120)) {
            Ok(result) => all.push(result),
            Err(error) => panic!(
                "only ranks {:?} of {world_size} ended well: {error}",
                all.iter().map(|(rank, _)| rank).collect::<Vec<_>>()
            ),
        }
    }
    drop(store);
    all.sort_by_key(|(rank, _)| *rank);
    all.into_iter().map(|(_, result)| result).collect()
}

/// The name of a case, its world size, and its function.
pub(crate) type SizedCase<'a> = (&'a str, usize, fn(Means, usize));

/// Runs cases at the same time, each at its world size, on threads named after them.
pub(crate) fn side_by_side(means: Means, cases: &[SizedCase<'_>]) {
    thread::scope(|scope| {
        for &(name, world_size, case) in cases {
            thread::Builder::new()
                .name(format!("{name}, W = {world_size}"))
                .spawn_scoped(scope, move || case(means, world_size))
                .unwrap();
        }
    });
}

/// Returns the launch of a rank that meets the others at a store of the test.
pub(crate) fn launch(rank: usize, world_size: usize, port: u16) -> Launch {
    Launch::new(
        Topology::new(rank, world_size).unwrap(),
        Rendezvous::new("127.0.0.1", port).with_store(StoreHost::Launcher),
    )
}
