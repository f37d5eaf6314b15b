//! Checks of the database: the consistency conditions of clause 3.3.2, and the orders that clients
//! saw committed.

use std::collections::HashMap;

use anyhow::ensure;
use mysql::Conn;
use mysql::prelude::Queryable as _;

use super::schema::{DISTRICTS, Scale, TABLES};
use super::transaction::Order;

/// The committed orders of a run, kept outside of the database.
#[derive(Clone, Debug, Default)]
pub struct Journal(Vec<Order>);

impl Journal {
    pub(super) fn join(parts: Vec<Vec<Order>>) -> Self {
        Self(parts.concat())
    }

    /// Adds the committed orders of a later run.
    pub fn append(&mut self, later: Self) {
        self.0.extend(later.0);
    }

    /// Number of orders.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no orders.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The conditions, each with a query that counts violations.
const CONDITIONS: [(&str, &str); 11] = [
    (
        "1: W_YTD = sum(D_YTD)",
        "SELECT COUNT(*) FROM warehouse WHERE w_ytd <> \
         (SELECT SUM(d_ytd) FROM district WHERE d_w_id = w_id)",
    ),
    (
        "2: D_NEXT_O_ID - 1 = max(O_ID)",
        "SELECT COUNT(*) FROM district WHERE d_next_o_id - 1 <> \
         (SELECT MAX(o_id) FROM orders WHERE o_w_id = d_w_id AND o_d_id = d_id)",
    ),
    (
        "2: D_NEXT_O_ID - 1 = max(NO_O_ID), where there are new orders",
        "SELECT COUNT(*) FROM district JOIN (SELECT no_w_id, no_d_id, MAX(no_o_id) AS last \
         FROM new_order GROUP BY no_w_id, no_d_id) AS n ON no_w_id = d_w_id AND no_d_id = d_id \
         WHERE d_next_o_id - 1 <> last",
    ),
    (
        "3: max(NO_O_ID) - min(NO_O_ID) + 1 = count of new orders",
        "SELECT COUNT(*) FROM (SELECT MAX(no_o_id) - MIN(no_o_id) + 1 - COUNT(*) AS wrong \
         FROM new_order GROUP BY no_w_id, no_d_id) AS n WHERE wrong <> 0",
    ),
    (
        "4: sum(O_OL_CNT) = count of order lines",
        "SELECT COUNT(*) FROM (SELECT o_w_id AS w, o_d_id AS d, SUM(o_ol_cnt) AS wanted \
         FROM orders GROUP BY o_w_id, o_d_id) AS o LEFT JOIN (SELECT ol_w_id AS w, \
         ol_d_id AS d, COUNT(*) AS found FROM order_line GROUP BY ol_w_id, ol_d_id) AS l \
         USING (w, d) WHERE found IS NULL OR wanted <> found",
    ),
    (
        "5: O_CARRIER_ID is null exactly for new orders",
        "SELECT COUNT(*) FROM orders LEFT JOIN new_order ON no_w_id = o_w_id AND no_d_id = o_d_id \
         AND no_o_id = o_id WHERE (o_carrier_id IS NULL) <> (no_o_id IS NOT NULL)",
    ),
    (
        "6: O_OL_CNT = count of the order's lines",
        "SELECT COUNT(*) FROM orders LEFT JOIN (SELECT ol_w_id, ol_d_id, ol_o_id, \
         COUNT(*) AS found FROM order_line GROUP BY ol_w_id, ol_d_id, ol_o_id) AS l \
         ON ol_w_id = o_w_id AND ol_d_id = o_d_id AND ol_o_id = o_id \
         WHERE found IS NULL OR found <> o_ol_cnt",
    ),
    (
        "7: OL_DELIVERY_D is null exactly where O_CARRIER_ID is",
        "SELECT COUNT(*) FROM order_line LEFT JOIN orders ON o_w_id = ol_w_id \
         AND o_d_id = ol_d_id AND o_id = ol_o_id \
         WHERE o_id IS NULL OR (ol_delivery_d IS NULL) <> (o_carrier_id IS NULL)",
    ),
    (
        "8: W_YTD = sum(H_AMOUNT)",
        "SELECT COUNT(*) FROM warehouse WHERE w_ytd <> \
         (SELECT SUM(h_amount) FROM history WHERE h_w_id = w_id)",
    ),
    (
        "9: D_YTD = sum(H_AMOUNT)",
        "SELECT COUNT(*) FROM district LEFT JOIN (SELECT h_w_id, h_d_id, SUM(h_amount) AS paid \
         FROM history GROUP BY h_w_id, h_d_id) AS h ON h_w_id = d_w_id AND h_d_id = d_id \
         WHERE paid IS NULL OR d_ytd <> paid",
    ),
    (
        "10 and 12: C_BALANCE = delivered - paid, and C_BALANCE + C_YTD_PAYMENT = delivered",
        "SELECT COUNT(*) FROM customer LEFT JOIN (SELECT o_w_id AS w, o_d_id AS d, o_c_id AS c, \
         SUM(ol_amount) AS delivered FROM order_line JOIN orders ON o_w_id = ol_w_id \
         AND o_d_id = ol_d_id AND o_id = ol_o_id WHERE ol_delivery_d IS NOT NULL \
         GROUP BY o_w_id, o_d_id, o_c_id) AS l ON w = c_w_id AND d = c_d_id AND c = c_id \
         LEFT JOIN (SELECT h_c_w_id, h_c_d_id, h_c_id, SUM(h_amount) AS paid FROM history \
         GROUP BY h_c_w_id, h_c_d_id, h_c_id) AS h ON h_c_w_id = c_w_id AND h_c_d_id = c_d_id \
         AND h_c_id = c_id WHERE c_balance <> COALESCE(delivered, 0) - COALESCE(paid, 0) \
         OR c_balance + c_ytd_payment <> COALESCE(delivered, 0)",
    ),
];

/// Checks conditions 1 to 10 and 12, which hold whenever no transaction is in progress.
///
/// # Errors
/// The first condition that is violated.
pub fn conditions(conn: &mut Conn) -> anyhow::Result<()> {
    for (name, query) in CONDITIONS {
        let wrong: Option<u64> = conn.query_first(query)?;
        let wrong = wrong.unwrap_or(u64::MAX);
        ensure!(wrong == 0, "TPC-C consistency condition {name}: {wrong} rows violate it");
    }
    Ok(())
}

/// Checks what holds only right after loading: condition 11, and the number of rows.
pub fn conditions_after_load(conn: &mut Conn, scale: Scale) -> anyhow::Result<()> {
    conditions(conn)?;
    let new = u64::from(scale.customers - scale.first_new_order() + 1);
    let old = u64::from(scale.customers) - new;
    let wrong: Option<u64> = conn.query_first(format!(
        "SELECT COUNT(*) FROM district WHERE {old} <> (SELECT COUNT(*) FROM orders WHERE \
         o_w_id = d_w_id AND o_d_id = d_id) - (SELECT COUNT(*) FROM new_order WHERE \
         no_w_id = d_w_id AND no_d_id = d_id)"
    ))?;
    ensure!(wrong == Some(0), "TPC-C consistency condition 11: {wrong:?} districts violate it");
    let (w, c) = (u64::from(scale.warehouses), u64::from(scale.customers));
    let districts = w * u64::from(DISTRICTS);
    for (table, wanted) in [
        ("item", u64::from(scale.items)),
        ("warehouse", w),
        ("district", districts),
        ("customer", districts * c),
        ("history", districts * c),
        ("orders", districts * c),
        ("new_order", districts * new),
        ("stock", w * u64::from(scale.items)),
    ] {
        let found: Option<u64> = conn.query_first(format!("SELECT COUNT(*) FROM {table}"))?;
        ensure!(found == Some(wanted), "table {table} has {found:?} rows, not {wanted}");
    }
    Ok(())
}

/// Checks that every order that a client saw committed is there and complete, and that every table
/// passes `CHECK TABLE`.
///
/// # Errors
/// The first order that is missing or differs, or the first table that fails.
pub fn check_journal(conn: &mut Conn, journal: &Journal) -> anyhow::Result<()> {
    let mut wanted: HashMap<(u32, u32), HashMap<u32, Order>> = HashMap::new();
    for order in &journal.0 {
        let district = wanted.entry((order.warehouse, order.district)).or_default();
        let twice = district.insert(order.number, *order);
        ensure!(twice.is_none(), "order {order:?} was committed twice: {twice:?} was lost");
    }
    for ((w, d), mut orders) in wanted {
        let first = orders.keys().min().copied().unwrap_or(0);
        let rows: Vec<(u32, u32, u32, u32)> = conn.exec(
            "SELECT o_id, o_c_id, o_ol_cnt, (SELECT COUNT(*) FROM order_line WHERE \
             ol_w_id = o_w_id AND ol_d_id = o_d_id AND ol_o_id = o_id) FROM orders \
             WHERE o_w_id = ? AND o_d_id = ? AND o_id >= ?",
            (w, d, first),
        )?;
        for (number, customer, lines, found) in rows {
            let Some(order) = orders.remove(&number) else { continue };
            ensure!(
                (order.customer, order.lines, order.lines) == (customer, lines, found),
                "order {order:?} has customer {customer}, {lines} lines, {found} of them there"
            );
        }
        ensure!(
            orders.is_empty(),
            "{} committed orders of warehouse {w}, district {d} are lost, as {:?}",
            orders.len(),
            orders.values().next()
        );
    }
    for table in TABLES {
        sound(conn, table)?;
    }
    Ok(())
}

fn sound(conn: &mut Conn, table: &str) -> anyhow::Result<()> {
    let rows: Vec<(String, String, String, String)> =
        conn.query(format!("CHECK TABLE {table} EXTENDED"))?;
    let good = rows.iter().any(|(.., kind, text)| kind == "status" && text == "OK");
    ensure!(good, "CHECK TABLE {table}: {rows:?}");
    Ok(())
}
