//! Memory that the ranks of one host share: what is where, and who may touch what.
#![expect(
    unsafe_code,
    reason = "memory that other ranks write to has no references; see the README of this folder"
)]

mod arena;
mod card;
mod holes;
mod hosts;
mod memory;
mod signal;
mod world;

pub(crate) use arena::{Arena, CHUNK, Key, Region};
pub(crate) use card::Brief;
pub(crate) use hosts::{Arrangement, Hosts};
pub(crate) use memory::Place;
pub(crate) use signal::{Spin, cores};
pub(crate) use world::World;
