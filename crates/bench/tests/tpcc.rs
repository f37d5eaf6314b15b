//! The TPC-C driver on a real MariaDB with one tiny warehouse: the consistency conditions hold
//! after loading, after a load, and after a kill; and each check detects its violation.

use std::time::Duration;

use forebay_bench::dbms::mariadb::MariaDb;
use forebay_bench::dbms::{Dbms as _, Setting};
use forebay_bench::rig::place::Place;
use forebay_bench::rig::{cleanup, needs};
use forebay_bench::tpcc::{self, Plan, Scale};
use mysql::prelude::Queryable as _;

const SCALE: Scale = Scale::tiny();

fn setting() -> Setting {
    Setting {
        buffer_pool: 64 << 20,
        redo_log: 32 << 20,
        durable: true,
        connections: 16,
        page_cache: None,
        more: Vec::new(),
    }
}

fn plan(millis: u64, seed: u64) -> Plan {
    Plan {
        scale: SCALE,
        terminals: 4,
        ramp: Duration::ZERO,
        measured: Duration::from_millis(millis),
        seed,
    }
}

/// Plants one violation, which the check must report with `what`, and undoes it.
fn plant(server: &MariaDb, statement: &str, undo: &str, what: &str) {
    let mut conn = server.connect("tpcc").expect("it is there");
    conn.query_drop(statement).expect(statement);
    let error = tpcc::conditions(&mut conn).expect_err(statement).to_string();
    assert!(error.contains(what), "{statement}: {error}");
    conn.query_drop(undo).expect(undo);
}

#[test]
fn transactions_keep_the_database_consistent_and_a_kill_loses_no_order() {
    if let Err(error) = needs::tools(&[
        ("mariadbd", "mariadb-server-core"),
        ("my_print_defaults", "mariadb-client-core"),
    ]) {
        panic!("{error}");
    }
    let place = Place::new(None).expect("a directory");
    let (data, run) = (place.path("data"), place.path("run"));
    MariaDb::install(&data).expect("a data directory");
    let server = MariaDb::start(&data, &run, &setting()).expect("a server");
    server.create("tpcc").expect("a database");
    tpcc::load(|| server.connect("tpcc"), SCALE, |_| {}).expect("it loads");
    let mut conn = server.connect("tpcc").expect("a connection");
    tpcc::conditions_after_load(&mut conn, SCALE).expect("what was loaded is right");

    let outcome = tpcc::run(|| server.connect("tpcc"), plan(3_000, 1), |_, _| {}).expect("a load");
    assert_eq!(outcome.broken, None);
    let counts = outcome.counts;
    assert!(counts.new_order > 50 && counts.payment > 50, "{counts:?}");
    assert!(counts.delivery > 0 && counts.order_status > 0 && counts.stock_level > 0);
    // Cards are dealt from decks of 23, with 10 new orders and 10 payments each.
    assert!(counts.new_order.abs_diff(counts.payment) <= 4 * 10 + 4, "{counts:?}");
    assert!(counts.new_order < counts.delivery * 40 && counts.new_order > counts.delivery * 2);
    assert_eq!(outcome.journal.len() as u64, counts.new_order - counts.rolled_back);
    assert_eq!(outcome.per_second.len(), 3);
    tpcc::conditions(&mut conn).expect("consistent after a load");
    tpcc::check_journal(&mut conn, &outcome.journal).expect("every order is there");

    plant(
        &server,
        "UPDATE warehouse SET w_ytd = w_ytd + 1",
        "UPDATE warehouse SET w_ytd = w_ytd - 1",
        "1: W_YTD",
    );
    plant(
        &server,
        "UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_id = 3",
        "UPDATE district SET d_next_o_id = d_next_o_id - 1 WHERE d_id = 3",
        "2: D_NEXT_O_ID",
    );
    plant(
        &server,
        "UPDATE customer SET c_balance = c_balance + 1 WHERE c_id = 7",
        "UPDATE customer SET c_balance = c_balance - 1 WHERE c_id = 7",
        "10 and 12",
    );
    plant(
        &server,
        "UPDATE orders SET o_carrier_id = NULL WHERE o_id = 2",
        "UPDATE orders SET o_carrier_id = 1 WHERE o_id = 2",
        "5: O_CARRIER_ID",
    );

    // The last order before the kill: clients may not have seen the last one after it.
    let last = "SELECT d_next_o_id - 1 FROM district WHERE d_id = 4";
    let last: Option<u32> = conn.query_first(last).expect("a district");
    let last = last.expect("it is there");

    // The server dies under the load; every order that clients saw committed must be there.
    let mut journal = outcome.journal;
    let later = std::thread::scope(|scope| {
        let load = scope.spawn(|| tpcc::run(|| server.connect("tpcc"), plan(60_000, 2), |_, _| {}));
        std::thread::sleep(Duration::from_millis(1_500));
        server.process().strike().expect("it can be killed");
        load.join().expect("no panic").expect("the load began")
    });
    assert!(later.broken.is_some() && !later.journal.is_empty());
    journal.append(later.journal);
    drop(server);
    let server = MariaDb::start(&data, &run, &setting()).expect("it recovers");
    let mut conn = server.connect("tpcc").expect("a connection");
    tpcc::conditions(&mut conn).expect("consistent after a kill");
    tpcc::check_journal(&mut conn, &journal).expect("every order is there after a kill");

    conn.exec_drop("DELETE FROM orders WHERE o_d_id = 4 AND o_id = ?", (last,))
        .expect("an order can be removed");
    let error = tpcc::check_journal(&mut conn, &journal).expect_err("it is missing").to_string();
    assert!(error.contains("lost"), "{error}");
    server.stop().expect("it stops in order");
    drop(place);
    cleanup::all();
}
