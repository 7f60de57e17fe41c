//! The parts that the benches share: networks, loops, processes that run the loops in turns, and statistics.

mod crew;
mod model;
mod output;
mod pair;
mod statistics;
mod usage;
pub mod worker;

pub use crew::{Crew, CrewLink, Plan, rank_variables};
pub use model::{
    Batch, Layers, Model, Net, Numbers, SampleBatcher, SampleKind, Samples, Shape, Transformer,
};
pub use output::Output;
pub use pair::{Pair, Step};
pub use statistics::{Interval, middle};
pub use usage::{Usage, peak_memory};
