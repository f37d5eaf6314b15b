//! Fills the tables as clause 4.3.3 specifies: rows are generated here and streamed to the server,
//! one warehouse per worker, two workers at a time.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::Context as _;
use mysql::prelude::Queryable as _;
use mysql::{Conn, LocalInfileHandler};

use super::driver::is_to_repeat;
use super::schema::{CREATE, DISTRICTS, Scale, TABLES};
use super::values::{C_LAST_LOAD, Values, last_name, money};

/// The entry date of all rows.
const DATE: &str = "2026-01-01 00:00:00";
/// Warehouses loaded at the same time.
const WORKERS: usize = 2;
/// Maximum number of tries to load a table of a warehouse.
const TRIES: u32 = 5;

/// Creates and fills the tables in the database that connections select; calls `progress` with the
/// number of loaded warehouses.
pub fn load(
    connect: impl Fn() -> anyhow::Result<Conn> + Sync,
    scale: Scale,
    progress: impl Fn(u32) + Sync,
) -> anyhow::Result<()> {
    let mut conn = connect()?;
    for statement in CREATE {
        conn.query_drop(statement)?;
    }
    fill(&mut conn, scale, 0, &TABLES[..1])?;
    let (next, done) = (AtomicU32::new(1), AtomicU32::new(0));
    let work = || -> anyhow::Result<()> {
        let mut conn = connect()?;
        loop {
            let warehouse = next.fetch_add(1, Relaxed);
            if warehouse > scale.warehouses {
                return Ok(());
            }
            fill(&mut conn, scale, warehouse, &TABLES[1..])
                .with_context(|| format!("loading warehouse {warehouse}"))?;
            progress(done.fetch_add(1, Relaxed) + 1);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))
    })?;
    conn.query_drop(format!("ANALYZE TABLE {}", TABLES.join(", ")))?;
    Ok(())
}

/// Fills the given tables with the rows of one warehouse.
fn fill(conn: &mut Conn, scale: Scale, warehouse: u32, tables: &[&str]) -> anyhow::Result<()> {
    conn.query_drop("SET unique_checks = 0, foreign_key_checks = 0")?;
    // Orders and their lines must match, so they are generated from the same seed.
    let handler = LocalInfileHandler::new(move |name, writer| {
        let name = String::from_utf8_lossy(name).into_owned();
        let mut out = String::new();
        rows(&name, scale, warehouse, &mut |row| {
            out.push_str(&row);
            out.push('\n');
            if out.len() < 1 << 20 {
                return Ok(());
            }
            let outcome = writer.write_all(out.as_bytes());
            out.clear();
            outcome
        })?;
        writer.write_all(out.as_bytes())
    });
    conn.set_local_infile_handler(Some(handler));
    for table in tables {
        let statement = format!("LOAD DATA LOCAL INFILE '{table}' INTO TABLE {table}");
        let mut outcome = conn.query_drop(&statement);
        // The first rows of an empty table lock all of it, so two loaders may deadlock.
        for _ in 1..TRIES {
            if !outcome.as_ref().is_err_and(is_to_repeat) {
                break;
            }
            outcome = conn.query_drop(&statement);
        }
        outcome.with_context(|| format!("table {table}"))?;
    }
    conn.set_local_infile_handler(None);
    Ok(())
}

/// Accepts a row, its columns separated by tabs.
type Sink<'a> = dyn FnMut(String) -> std::io::Result<()> + 'a;

fn rows(table: &str, scale: Scale, w: u32, sink: &mut Sink<'_>) -> std::io::Result<()> {
    let seed = |kind: u64| Values::new(u64::from(w) * 16 + kind);
    match table {
        "item" => items(scale, &mut seed(1), sink),
        "warehouse" => warehouse(scale, w, &mut seed(2), sink),
        "district" => districts(scale, w, &mut seed(3), sink),
        "customer" => customers(scale, w, &mut seed(4), sink),
        "history" => histories(scale, w, &mut seed(5), sink),
        "orders" => orders(scale, w, &mut seed(6), Part::Orders, sink),
        "new_order" => orders(scale, w, &mut seed(6), Part::NewOrders, sink),
        "order_line" => orders(scale, w, &mut seed(6), Part::Lines, sink),
        _ => stock(scale, w, &mut seed(7), sink),
    }
}

fn items(scale: Scale, v: &mut Values, sink: &mut Sink<'_>) -> std::io::Result<()> {
    (1..=scale.items).try_for_each(|id| {
        let (image, name) = (v.within(1, 10_000), v.text(14, 24));
        let price = money(v.within(100, 10_000) as i64);
        sink(format!("{id}\t{image}\t{name}\t{price}\t{}", v.data()))
    })
}

fn address(v: &mut Values) -> String {
    let streets = [v.text(10, 20), v.text(10, 20), v.text(10, 20), v.text(2, 2)];
    format!("{}\t{}", streets.join("\t"), v.zip())
}

fn tax(v: &mut Values) -> String {
    format!("0.{:04}", v.within(0, 2000))
}

/// A district's payments received: 10.00 from each customer, 30,000.00 as specified.
fn received(scale: Scale) -> i64 {
    i64::from(scale.customers) * 1_000
}

fn warehouse(scale: Scale, w: u32, v: &mut Values, sink: &mut Sink<'_>) -> std::io::Result<()> {
    let (name, address, tax) = (v.text(6, 10), address(v), tax(v));
    let ytd = money(received(scale) * i64::from(DISTRICTS));
    sink(format!("{w}\t{name}\t{address}\t{tax}\t{ytd}"))
}

fn districts(scale: Scale, w: u32, v: &mut Values, sink: &mut Sink<'_>) -> std::io::Result<()> {
    (1..=DISTRICTS).try_for_each(|d| {
        let (name, address, tax) = (v.text(6, 10), address(v), tax(v));
        let (ytd, next) = (money(received(scale)), scale.customers + 1);
        sink(format!("{d}\t{w}\t{name}\t{address}\t{tax}\t{ytd}\t{next}"))
    })
}

fn customers(scale: Scale, w: u32, v: &mut Values, sink: &mut Sink<'_>) -> std::io::Result<()> {
    for d in 1..=DISTRICTS {
        for c in 1..=scale.customers {
            let last = match c {
                1..=1000 => last_name(u64::from(c) - 1),
                _ => v.last_name(C_LAST_LOAD, scale.customers),
            };
            let (first, address, phone) = (v.text(8, 16), address(v), v.digits(16));
            let credit = if v.chance(10) { "BC" } else { "GC" };
            let (discount, data) = (v.within(0, 5000), v.text(300, 500));
            sink(format!(
                "{c}\t{d}\t{w}\t{first}\tOE\t{last}\t{address}\t{phone}\t{DATE}\t{credit}\t\
                 50000.00\t0.{discount:04}\t-10.00\t10.00\t1\t0\t{data}"
            ))?;
        }
    }
    Ok(())
}

fn histories(scale: Scale, w: u32, v: &mut Values, sink: &mut Sink<'_>) -> std::io::Result<()> {
    for d in 1..=DISTRICTS {
        for c in 1..=scale.customers {
            sink(format!("{c}\t{d}\t{w}\t{d}\t{w}\t{DATE}\t10.00\t{}", v.text(12, 24)))?;
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Orders,
    NewOrders,
    Lines,
}

/// The orders of a warehouse; called three times with the same seed, once for each table.
fn orders(
    scale: Scale,
    w: u32,
    v: &mut Values,
    part: Part,
    sink: &mut Sink<'_>,
) -> std::io::Result<()> {
    // The content of the lines has its own source, so that all three calls generate the same
    // orders.
    let mut content = Values::new(u64::from(w) * 16 + 8);
    for d in 1..=DISTRICTS {
        for (o, c) in (1..).zip(v.permutation(scale.customers)) {
            let (count, carrier) = (v.within(5, 15), v.within(1, 10));
            let new = o >= scale.first_new_order();
            let carrier = if new { "\\N".to_owned() } else { carrier.to_string() };
            match part {
                Part::Orders => sink(format!("{o}\t{d}\t{w}\t{c}\t{DATE}\t{carrier}\t{count}\t1"))?,
                Part::NewOrders if new => sink(format!("{o}\t{d}\t{w}"))?,
                Part::NewOrders => {}
                Part::Lines => lines(scale, [o, d, w], count, &mut content, sink)?,
            }
        }
    }
    Ok(())
}

/// The lines of one order, given its number, district and warehouse.
fn lines(
    scale: Scale,
    [o, d, w]: [u32; 3],
    count: u64,
    v: &mut Values,
    sink: &mut Sink<'_>,
) -> std::io::Result<()> {
    let new = o >= scale.first_new_order();
    (1..=count).try_for_each(|line| {
        let item = v.within(1, u64::from(scale.items));
        let (date, amount) = if new { ("\\N", v.within(1, 999_999)) } else { (DATE, 0) };
        let (amount, info) = (money(amount as i64), v.text(24, 24));
        sink(format!("{o}\t{d}\t{w}\t{line}\t{item}\t{w}\t{date}\t5\t{amount}\t{info}"))
    })
}

fn stock(scale: Scale, w: u32, v: &mut Values, sink: &mut Sink<'_>) -> std::io::Result<()> {
    (1..=scale.items).try_for_each(|i| {
        let mut row = format!("{i}\t{w}\t{}", v.within(10, 100));
        for _ in 0..DISTRICTS {
            write!(row, "\t{}", v.text(24, 24)).expect("writing to memory never fails");
        }
        sink(format!("{row}\t0\t0\t0\t{}", v.data()))
    })
}
