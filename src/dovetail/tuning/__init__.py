"""Plans: fusion boundaries, pass order and backends chosen by measurement."""
